"""Secrets: which values of the environment are some, texts without them, and values of a job that look like one.

A run directory is copied, shown and archived, so no secret may reach a file of it. What is written there passes a
`Redactor`; what cannot (a job is kept to the letter) is refused at the door.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus, unquote

HIDDEN = "***"
MIN_LENGTH = 8  # "1", "true" or "disabled" in place of a key must not blank out ordinary words

_ENDINGS = (
    *("KEY", "KEYS", "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWORDS", "PASSWD", "PASSPHRASE"),
    *("CREDENTIAL", "CREDENTIALS", "WEBHOOK"),
)
_WORDS = frozenset(("PASS", "AUTH", "AUTHORIZATION", "BEARER", "COOKIE", "JWT", "PAT", "DSN"))
_PLACES = frozenset(("FILE", "PATH", "DIR", "SOCK", "NAME"))  # TOKEN_FILE says where a secret lies, and is none
_URL_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]*:([^/\s@]+)@")
# In the arguments of a model "pad_token" and "num_key_heads" are ordinary: there, these words need company or a value
# that looks like a key.
_AMBIGUOUS = frozenset(("KEY", "KEYS", "TOKEN", *_WORDS))
_COMPANY = frozenset(("API", "ACCESS", "AUTH", "BEARER", "PRIVATE", "SECRET", "REFRESH"))
_LOOKS_RANDOM = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9_\-.+/=]{16,}")


class Redactor:
    """Replaces every secret of `environ` by `***`. The mapping is asked anew each time: user code may add to it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, text: str) -> str:
        pattern = self._now()
        return text if pattern is None else pattern.sub(HIDDEN, text)

    def value(self, value: Any) -> Any:
        """`value` (of JSON's types) with `text` applied to every string in it, keys too."""
        pattern = self._now()
        return value if pattern is None else _cleaned(value, pattern)

    def _now(self) -> re.Pattern[str] | None:
        return _pattern(tuple(secret_values(self._environ).values()))


def _cleaned(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(HIDDEN, value)
    if isinstance(value, dict):
        return {_cleaned(key, pattern): _cleaned(item, pattern) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(item, pattern) for item in value]
    return value


def secret_values(environ: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The secrets of `environ` by variable: values of variables that are named like one, and passwords in URLs.

    Of a value with several lines (a private key), each line: messages are squeezed to one.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, value in environ.items():
        if len(value) < MIN_LENGTH:
            continue
        whole = (value,) if is_secret_name(name) and not _is_a_path(value) else ()
        parts = [part.strip() for text in whole for part in (text, *text.splitlines())]
        parts += _URL_PASSWORD.findall(value) if "@" in value else ()
        if secrets := tuple(dict.fromkeys(part for part in parts if len(part) >= MIN_LENGTH)):
            found[name] = secrets
    return found


def _is_a_path(value: str) -> bool:
    """GOOGLE_APPLICATION_CREDENTIALS holds the name of a file; hiding a folder's name would hide every path in it."""
    return value.startswith("/") and os.path.lexists(value)


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """True for names like WANDB_API_KEY, hf_token, PGPASSWORD; not for KEY_FILE, TOKENIZERS_PARALLELISM or PWD."""
    words = _words(name)
    if not words or words[-1] in _PLACES:
        return False
    return any(word.endswith(_ENDINGS) or word in _WORDS for word in words)


def carried_secret(name: str, value: str, environ: Mapping[str, str]) -> str | None:
    """Why `value`, given in a job under `name`, must not be written down; None if nothing speaks against it."""
    for variable, secrets in secret_values(environ).items():
        if any(secret in value for secret in secrets):
            return f"holds the secret of the environment variable {variable}"
    if _URL_PASSWORD.search(value):
        return "is a URL with a password in it"
    if value and is_secret_name(name) and (_is_certain(name) or _LOOKS_RANDOM.fullmatch(value)):
        return "is named like a secret, and a run keeps its job"
    return None


def _is_certain(name: str) -> bool:
    """True where the last word alone says it (password), or the one before does (api_key)."""
    *before, last = _words(name)
    if last in _AMBIGUOUS:
        return bool(before) and before[-1] in _COMPANY
    return last.endswith(_ENDINGS) and (not last.endswith(("TOKEN", "KEY", "KEYS")) or last.startswith(tuple(_COMPANY)))


def _words(name: str) -> list[str]:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)  # apiKey -> api_Key
    return [word.rstrip("0123456789") for word in re.split(r"[^A-Z0-9]+", spaced.upper()) if word]


@lru_cache(maxsize=8)
def _pattern(groups: tuple[tuple[str, ...], ...]) -> re.Pattern[str] | None:
    """Matches each secret as it is and as URLs, JSON and Python's repr write it; the longest first."""
    spellings = {spelling for group in groups for secret in group for spelling in _spellings(secret)}
    ordered = sorted((text for text in spellings if len(text) >= MIN_LENGTH), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _spellings(secret: str) -> Iterable[str]:
    yield secret
    yield unquote(secret)
    yield quote(secret, safe="")
    yield quote(secret)
    yield quote_plus(secret)
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    yield repr(secret)[1:-1]
    yield " ".join(secret.split())
