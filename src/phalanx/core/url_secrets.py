"""Secrets by their place in a text: passwords and tokens in URLs, queries and connection
strings, of any length."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from urllib.parse import unquote

IsSecret = Callable[[str, str], bool]
Span = tuple[int, int]

# Quotes and angle brackets end a URL in JSON, in code and in prose, and are not allowed in one.
_URL_CREDENTIALS_PATTERN = re.compile(r"://([^/\s:@\"'<>]*)(?::([^/\s\"'<>]+))?@(?=[^\s/@])")
_PORT_PATTERN = re.compile(r"\d{1,5}(?:$|[,;)\]}])")  # http://host:80,me@home has none
_QUERY_PARAMETER_PATTERN = re.compile(
    r"(?:^|[?&;#\s])([A-Za-z][A-Za-z0-9_.\-$%]*)=([^&;#\s\"'<>]+)"
)
_URL_PARAMETER_PATTERN = re.compile(r"[?&;#]([A-Za-z][A-Za-z0-9_.\-$%]*)=([^&;#\s\"'<>]+)")
_PLACEHOLDER_PATTERN = re.compile(
    r"\$?\{.*\}|\$\w+|%\(\w+\)s|%s|\*+|\.\.\."
)  # where code will put one
_RANDOM_TEXT_PATTERN = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9_\-.+/=]{16,}")


def looks_like_random_text(value: str) -> bool:
    """True for what nobody would type: 16 characters or more, letters and digits among them."""
    return _RANDOM_TEXT_PATTERN.fullmatch(value) is not None


def find_url_credential_spans(text: str) -> Iterator[Span]:
    """The passwords of `scheme://user:password@host`, and users that look like a token."""
    if "://" not in text:
        return
    for match in _URL_CREDENTIALS_PATTERN.finditer(text):
        user, password = match.group(1), match.group(2)
        if user and looks_like_random_text(user):
            yield match.span(1)
        if password and not _PORT_PATTERN.match(password) and not is_placeholder_text(password):
            yield match.span(2)


def find_secret_parameter_spans(
    text: str, is_secret: IsSecret, *, anywhere: bool = False
) -> Iterator[Span]:
    """The values in `?name=value&name=value` (and after a semicolon) for which `is_secret(name,
    value)`.

    `anywhere`: also at the beginning and between spaces, as connection strings have them.
    """
    if "=" not in text:
        return
    pattern = _QUERY_PARAMETER_PATTERN if anywhere else _URL_PARAMETER_PATTERN
    for match in pattern.finditer(text):
        name, value = unquote(match.group(1)), match.group(2)
        if not is_placeholder_text(value) and is_secret(name, value):
            yield match.span(2)


def is_placeholder_text(value: str) -> bool:
    """True for `{password}`, `$PASSWORD`, `***`: code that is shown, or what was hidden already."""
    return _PLACEHOLDER_PATTERN.fullmatch(value) is not None
