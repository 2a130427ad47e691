"""How a known secret may be spelled in a text: as it is, encoded, broken by a line's end, or a piece of it.

What is found: the secret as it is and as URLs, JSON, Python's repr (of text and of bytes), base64 (also in something
longer, as `user:password` is), base32, hex and percent-encoding write it; each of these broken by line ends; and of a
secret that looks random, any piece of PIECE_CHARS or more that does. What is not: a shorter piece, a secret that was
encrypted, compressed, hashed, turned around, or encoded twice.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote, quote_plus, unquote

from phalanx.core.url_secrets import looks_random

HIDDEN = "***"
MIN_LENGTH = 8  # "1", "true" or "disabled" in place of a key must not blank out ordinary words
PIECE_CHARS = 12  # of a secret of 16 or more
_ENCODED_CHARS = 10  # of base64, where a secret is only a part of what was encoded
_WORD = re.compile(rf"[A-Za-z0-9_\-.+/=]{{{PIECE_CHARS},}}")
_BREAK = r"(?:[ \t]*\\?\r?\n[ \t>|]*)?"


@dataclass(frozen=True)
class Spellings:
    """What to look for. `pieces` are all substrings of PIECE_CHARS that stand for a secret."""

    whole: re.Pattern[str] | None
    broken: re.Pattern[str] | None
    pieces: frozenset[str]

    def hide(self, text: str) -> str:
        """`text` with HIDDEN in place of every secret that is found in it."""
        if self.whole is None:
            return text
        text = self.whole.sub(HIDDEN, text)
        if "\n" in text and self.broken is not None:
            text = self.broken.sub(HIDDEN, text)
        return _WORD.sub(self._hide_pieces, text) if self.pieces else text

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Where they are in `text`; some may overlap."""
        if self.whole is None:
            return
        for pattern in (self.whole, self.broken):
            yield from (found.span() for found in pattern.finditer(text)) if pattern is not None else ()
        for word in _WORD.finditer(text) if self.pieces else ():
            yield from ((word.start() + start, word.start() + end) for start, end in self._runs(word[0]))

    def _hide_pieces(self, found: re.Match[str]) -> str:
        word = found[0]
        for start, end in reversed(list(self._runs(word))):
            word = word[:start] + HIDDEN + word[end:]
        return word

    def _runs(self, word: str) -> Iterator[tuple[int, int]]:
        """Stretches of `word` that are pieces, joined where they overlap."""
        start = end = -1
        for at in range(len(word) - PIECE_CHARS + 1):
            if word[at : at + PIECE_CHARS] not in self.pieces:
                continue
            if at > end:
                if end > 0:
                    yield start, end
                start = at
            end = at + PIECE_CHARS
        if end > 0:
            yield start, end


@lru_cache(maxsize=32)
def spellings_of(groups: tuple[tuple[str, ...], ...]) -> Spellings:
    """The spellings of all secrets; the longest are looked for first."""
    secrets = {secret for group in groups for secret in group}
    written = {text for secret in secrets for text in _written(secret)}
    encoded = {text for secret in secrets for text in _encoded(secret)}
    whole = [text for text in written if len(text) >= MIN_LENGTH] + [
        text for text in encoded if len(text) >= _ENCODED_CHARS
    ]
    ordered = sorted(set(whole), key=lambda text: (-len(text), text))
    random = [text for text in (*secrets, *encoded) if looks_random(text)]
    return Spellings(
        re.compile("|".join(map(re.escape, ordered))) if ordered else None,
        re.compile("|".join(_BREAK.join(map(re.escape, text)) for text in ordered)) if ordered else None,
        frozenset(piece for text in random for piece in _pieces(text)),
    )


def _pieces(secret: str) -> Iterator[str]:
    """Those that no word has: with a digit among letters, or capitals among small letters."""
    for at in range(len(secret) - PIECE_CHARS + 1):
        piece = secret[at : at + PIECE_CHARS]
        letters = [letter for letter in piece if letter.isalpha()]
        has_digits = sum(letter.isdigit() for letter in piece) >= 2 and len(letters) >= 2
        has_cases = 2 <= sum(letter.isupper() for letter in letters) <= len(letters) - 2
        if has_digits or has_cases:
            yield piece


def _written(secret: str) -> Iterable[str]:
    yield secret
    yield unquote(secret)
    yield quote(secret, safe="")
    yield quote(secret)
    yield quote_plus(secret)
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    yield json.dumps(json.dumps(secret)[1:-1])[1:-1]  # JSON that is a text in JSON
    yield repr(secret)[1:-1]
    yield repr(_bytes_of(secret))[2:-1]
    yield " ".join(secret.split())


def _encoded(secret: str) -> Iterable[str]:
    raw = _bytes_of(secret)
    for digits in (raw.hex(), "".join(f"%{byte:02x}" for byte in raw), "".join(f"\\x{byte:02x}" for byte in raw)):
        yield digits
        yield digits.upper().replace("\\X", "\\x")
    yield raw.hex(" ")
    yield raw.hex(":")
    yield base64.b32encode(raw).decode().rstrip("=")
    for num_before in range(3):  # letters of base64 stand for three bytes each, wherever the secret begins
        text = base64.b64encode(b"\0" * num_before + raw).decode().rstrip("=")
        begin = -(-num_before * 8 // 6)
        end = (num_before + len(raw)) * 8 // 6
        yield text[begin:end]
        yield text[begin:end].translate(str.maketrans("+/", "-_"))


def _bytes_of(secret: str) -> bytes:
    return secret.encode("utf-8", "surrogateescape") if secret.isprintable() else secret.encode("utf-8", "replace")
