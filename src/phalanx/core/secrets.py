"""Secrets: which values of the environment are some, texts without them, and values of a job that
look like one.

A run directory is copied, shown and archived, so no secret may reach a file of it. Text passes a
`Redactor` where it becomes bytes (events, logs, errors, pages), so that no writer has to think of
it; what cannot be changed on the way (a job is kept to the letter) is refused at the door.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from phalanx.core.spellings import (
    MIN_SECRET_CHARS,
    REDACTED_TEXT,
    SecretSpellings,
    build_secret_spellings,
)
from phalanx.core.url_secrets import (
    Span,
    find_secret_parameter_spans,
    find_url_credential_spans,
    looks_like_random_text,
)

_SECRET_NAME_ENDINGS = (
    *("KEY", "KEYS", "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWORDS", "PASSWD", "PASSPHRASE"),
    *("CREDENTIAL", "CREDENTIALS", "WEBHOOK"),
)
_SECRET_NAME_WORDS = frozenset(
    ("PASS", "AUTH", "AUTHORIZATION", "BEARER", "COOKIE", "JWT", "PAT", "DSN")
)
# TOKEN_FILE says where a secret lies, and is none.
_PATH_NAME_WORDS = frozenset(("FILE", "PATH", "DIR", "SOCK", "NAME"))
# The folder that a shell is in, and was in.
_WORKING_DIR_VARIABLES = frozenset(("PWD", "OLDPWD"))
_CONNECTION_STRING_NAMES = frozenset(("CONNECTIONSTRING", "CONNSTR"))
# In the arguments of a model "pad_token" and "num_key_heads" are ordinary: there, these words need
# company or a value that looks like a key.
_AMBIGUOUS_NAME_WORDS = frozenset(("KEY", "KEYS", "TOKEN", *_SECRET_NAME_WORDS))
_SECRET_NAME_QUALIFIERS = frozenset(
    ("API", "ACCESS", "ACCOUNT", "AUTH", "BEARER", "PRIVATE", "SECRET", "REFRESH")
)
# In a query these hold secrets, whatever they hold elsewhere.
_SECRET_QUERY_PARAMETERS = frozenset(("TOKEN", "SIG", "SIGNATURE", "PWD"))


class Redactor:
    """Replaces every secret of `environ`, and what URLs carry, by `***`.

    The mapping is asked anew each time: user code may add to it.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def redact_text(self, text: str) -> str:
        return _hide_secrets(text, self._get_current_spellings())

    def redact_value(self, value: Any) -> Any:
        """`value` (of JSON's types) with `text` applied to every string in it, keys too."""
        return _hide_secrets_in_value(value, self._get_current_spellings())

    def _get_current_spellings(self) -> SecretSpellings:
        return build_secret_spellings(tuple(find_secret_values_by_variable(self._environ).values()))


def _hide_secrets_in_value(value: Any, known: SecretSpellings) -> Any:
    if isinstance(value, str):
        return _hide_secrets(value, known)
    if isinstance(value, dict):
        return {
            _hide_secrets_in_value(key, known): _hide_secrets_in_value(item, known)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_hide_secrets_in_value(item, known) for item in value]
    return value


def _hide_secrets(text: str, known: SecretSpellings) -> str:
    """Known secrets first: what is left of a URL around them is looked at by its form."""
    text = known.hide(text)
    # From the end on, so that the places of those before stay right.
    for start, end in reversed(find_url_secret_spans(text)):
        text = text[:start] + REDACTED_TEXT + text[end:]
    return text


def find_url_secret_spans(text: str) -> list[Span]:
    """Spans of the secrets in `text` that are known by their place: a URL's password or token.

    In order, none in another.
    """
    spans: list[Span] = []
    # Sorted by where they begin: one that begins inside of another is a part of it.
    for span in sorted(
        {
            *find_url_credential_spans(text),
            *find_secret_parameter_spans(text, _is_secret_query_parameter),
        }
    ):
        if not spans or span[0] >= spans[-1][1]:
            spans.append(span)
    return spans


def _is_secret_query_parameter(name: str, value: str) -> bool:
    words = _split_name_into_words(name)
    if words and (words[-1] in _SECRET_QUERY_PARAMETERS or words[-1].endswith("SIGNATURE")):
        return True
    return _is_unambiguous_secret_name(name) or (
        is_secret_name(name) and looks_like_random_text(value)
    )


def find_secret_values_by_variable(environ: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The secrets of `environ` by variable: values of variables that are named like one, and what
    URLs in any carry.

    Of a value with several lines (a private key), each line: messages are squeezed to one.
    """
    secrets_by_name: dict[str, tuple[str, ...]] = {}
    for name, value in environ.items():
        # A short value would be found, and hidden, in ordinary words.
        if len(value) < MIN_SECRET_CHARS:
            continue
        parts = []
        if is_secret_name(name) and not _is_path_variable(value):
            parts += [part.strip() for part in (value, *value.splitlines())]
        spans = find_url_secret_spans(value)
        if _is_connection_string_name(name):
            spans += find_secret_parameter_spans(value, _is_secret_query_parameter, anywhere=True)
        parts += [value[start:end] for start, end in spans]
        # Without repetitions: a value of one line is a line of it, too.
        if secrets := tuple(dict.fromkeys(part for part in parts if len(part) >= MIN_SECRET_CHARS)):
            secrets_by_name[name] = secrets
    return secrets_by_name


def _is_path_variable(value: str) -> bool:
    """GOOGLE_APPLICATION_CREDENTIALS holds the name of a file; hiding a folder's name would hide
    every path in it."""
    return value.startswith("/") and os.path.lexists(value)


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """True for names like WANDB_API_KEY, hf_token, MYSQL_PWD; not for KEY_FILE,
    TOKENIZERS_PARALLELISM or PWD."""
    words = _split_name_into_words(name)
    if not words or words[-1] in _PATH_NAME_WORDS:
        return False
    return (
        any(word.endswith(_SECRET_NAME_ENDINGS) or word in _SECRET_NAME_WORDS for word in words)
        or ("".join(words) not in _WORKING_DIR_VARIABLES and words[-1].endswith("PWD"))
        or _is_connection_string_name(name)
    )


def _is_connection_string_name(name: str) -> bool:
    """True for AZURE_STORAGE_CONNECTION_STRING: several settings in one value, secrets among
    them."""
    return "".join(_split_name_into_words(name)).endswith(tuple(_CONNECTION_STRING_NAMES))


def explain_secret_in_job(name: str, value: str, environ: Mapping[str, str]) -> str | None:
    """Why `value`, given in a job under `name`, must not be written down; None if nothing speaks
    against it."""
    return explain_secret_beside_known(name, value, find_secret_values_by_variable(environ))


def explain_secret_beside_known(
    name: str, value: str, secrets_by_variable: Mapping[str, tuple[str, ...]]
) -> str | None:
    """As `explain_secret_in_job`, with what `find_secret_values_by_variable` returned, which takes
    longer than the rest where many values are looked at."""
    for variable, secrets in secrets_by_variable.items():
        if build_secret_spellings((secrets,)).hide(value) != value:
            return f"holds the secret of the environment variable {variable}"
    if any(find_url_credential_spans(value)):
        return "is a URL with a password in it"
    if any(
        find_secret_parameter_spans(
            value, _is_secret_job_value, anywhere=_is_connection_string_name(name)
        )
    ):
        return "is a URL or a connection string with a secret in it"
    if (
        value
        and is_secret_name(name)
        and (_is_unambiguous_secret_name(name) or looks_like_random_text(value))
    ):
        return "is named like a secret, and a run keeps its job"
    return None


def _is_secret_job_value(name: str, value: str) -> bool:
    """A job is refused for it, so a page_token=2 is none."""
    return _is_unambiguous_secret_name(name) or (
        looks_like_random_text(value) and _is_secret_query_parameter(name, value)
    )


def _is_unambiguous_secret_name(name: str) -> bool:
    """True where the last word alone says it (password), or the one before does (api_key)."""
    if not _split_name_into_words(name):
        return False
    *before, last = _split_name_into_words(name)
    if last == "PWD":
        return bool(before) and (*before, last) != ("OLD", "PWD")
    if last in _AMBIGUOUS_NAME_WORDS:
        return bool(before) and before[-1] in _SECRET_NAME_QUALIFIERS
    return last.endswith(_SECRET_NAME_ENDINGS) and (
        not last.endswith(("TOKEN", "KEY", "KEYS"))
        or last.startswith(tuple(_SECRET_NAME_QUALIFIERS))
    )


def _split_name_into_words(name: str) -> list[str]:
    # apiKey -> api_Key
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return [word.rstrip("0123456789") for word in re.split(r"[^A-Z0-9]+", spaced.upper()) if word]
