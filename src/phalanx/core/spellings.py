"""How a known secret may be spelled in a text: as it is, encoded, broken by a line's end, or a
piece of it.

What is found: the secret as it is and as URLs, JSON, Python's repr (of text and of bytes), base64
(also in something longer, as `user:password` is), base32, hex and percent-encoding write it; each
of these broken by line ends; and of a secret that looks random, any piece of SECRET_PIECE_CHARS or
more that does. What is not: a shorter piece, a secret that was encrypted, compressed, hashed,
turned around, or encoded twice.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING
from urllib.parse import quote, quote_plus, unquote

from phalanx.core.url_secrets import looks_like_random_text

if TYPE_CHECKING:
    import numpy as np

REDACTED_TEXT = "***"
# "1", "true" or "disabled" in place of a key must not blank out ordinary words.
MIN_SECRET_CHARS = 8
# Of a secret of 16 or more.
SECRET_PIECE_CHARS = 12
# Of base64, where a secret is only a part of what was encoded.
_ENCODED_CHARS = 10
_LONG_WORD_PATTERN = re.compile(rf"[A-Za-z0-9_\-.+/=]{{{SECRET_PIECE_CHARS},}}")
_LINE_BREAK_REGEX = r"(?:[ \t]*\\?\r?\n[ \t>|]*)?"
_LINE_BREAK_BYTES = b" \t\\\r\n>|"
# half of the shortest spelling: each has one that begins at a multiple of it, wherever it lies
_GRAM_BYTES = 4
_HASH_FACTOR, _HASH_SHIFT = 2654435761, 12
_LINE_BREAK_WINDOW_BYTES = 96


@dataclass(frozen=True)
class SecretSpellings:
    """The texts to look for. `pieces` are all substrings of SECRET_PIECE_CHARS that stand for a
    secret."""

    unbroken: re.Pattern[str] | None
    broken: re.Pattern[str] | None
    pieces: frozenset[str]
    texts: tuple[bytes, ...] = ()
    """What `unbroken` looks for, as far as bytes that are read as latin-1 can hold it."""

    def find_stretches_to_search(self, data: bytes) -> list[tuple[int, int]]:
        """Stretches of `data` outside of which `find_secret_spans` finds nothing: a look that is a
        hundred times quicker."""
        import numpy as np

        if not self.texts or len(data) < _GRAM_BYTES:
            return []
        reach = max(map(len, self.texts))
        grams = np.frombuffer(data, "<u4", len(data) // _GRAM_BYTES)
        hashes = _hash_grams(grams)
        short, long = (known[hashes] for known in self._known_gram_tables)
        # A long one has two beside each other.
        short[:-1] |= long[:-1] & long[1:]
        stretches = []
        for at in (np.flatnonzero(short) * _GRAM_BYTES).tolist():
            stretches.append((at - reach, at + reach))
        reach += _LINE_BREAK_WINDOW_BYTES
        for at in self._find_line_breaks(data):
            stretches.append((at - reach, at + reach))
        return _merge_spans(stretches)

    @cached_property
    def _known_gram_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Two tables by hash, for short spellings and for long ones: True if one of them has such
        a gram."""
        short, long = [], []
        for text in self.texts:
            # From 11 bytes on two grams that begin at multiples of 4 lie in it, wherever it does.
            if len(text) < 3 * _GRAM_BYTES - 1:
                short.append(text)
            else:
                long.append(text)
        return _build_gram_table(_list_byte_grams(short)), _build_gram_table(_list_byte_grams(long))

    @cached_property
    def _known_line_break_grams(self) -> frozenset[bytes]:
        return frozenset(
            _list_byte_grams(text.translate(None, _LINE_BREAK_BYTES) for text in self.texts)
        )

    def _find_line_breaks(self, data: bytes) -> Iterator[int]:
        """Ends of lines across which a spelling may go on."""
        known, at = self._known_line_break_grams, data.find(b"\n")
        while at >= 0:
            before = data[max(at - _LINE_BREAK_WINDOW_BYTES, 0) : at].translate(
                None, _LINE_BREAK_BYTES
            )[-3:]
            after = data[at : at + _LINE_BREAK_WINDOW_BYTES].translate(None, _LINE_BREAK_BYTES)[:3]
            if (
                before[-2:] + after[:2] in known
                or before[-1:] + after in known
                or before + after[:1] in known
            ):
                yield at
            at = data.find(b"\n", at + 1)

    def hide(self, text: str) -> str:
        """`text` with REDACTED_TEXT in place of every secret that is found in it."""
        if self.unbroken is None:
            return text
        text = self.unbroken.sub(REDACTED_TEXT, text)
        if "\n" in text and self.broken is not None:
            text = self.broken.sub(REDACTED_TEXT, text)
        if self.pieces:
            text = _LONG_WORD_PATTERN.sub(self._hide_pieces_in_match, text)
        return text

    def find_secret_spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Spans of the secrets in `text`; some may overlap."""
        if self.unbroken is None or self.broken is None:
            return
        for pattern in (self.unbroken, self.broken):
            for match in pattern.finditer(text):
                yield match.span()
        if not self.pieces:
            return
        for word in _LONG_WORD_PATTERN.finditer(text):
            for start, end in self._find_joined_pieces(word[0]):
                yield word.start() + start, word.start() + end

    def _hide_pieces_in_match(self, match: re.Match[str]) -> str:
        word = match[0]
        for start, end in reversed(list(self._find_joined_pieces(word))):
            word = word[:start] + REDACTED_TEXT + word[end:]
        return word

    def _find_joined_pieces(self, word: str) -> Iterator[tuple[int, int]]:
        """Stretches of `word` that are pieces, joined where they overlap."""
        start = end = -1
        for at in range(len(word) - SECRET_PIECE_CHARS + 1):
            if word[at : at + SECRET_PIECE_CHARS] not in self.pieces:
                continue
            if at > end:
                if end > 0:
                    yield start, end
                start = at
            end = at + SECRET_PIECE_CHARS
        if end > 0:
            yield start, end


@lru_cache(maxsize=32)
def build_secret_spellings(groups: tuple[tuple[str, ...], ...]) -> SecretSpellings:
    """The spellings of all secrets; the longest are looked for first."""
    secrets = set(itertools.chain.from_iterable(groups))
    plain: set[str] = set()
    encoded: set[str] = set()
    for secret in secrets:
        plain.update(_list_plain_spellings(secret))
        encoded.update(_list_encodings(secret))
    texts = {text for text in plain if len(text) >= MIN_SECRET_CHARS}
    texts |= {text for text in encoded if len(text) >= _ENCODED_CHARS}
    # The longest first: of two that begin alike a pattern takes the one that stands first in it.
    ordered = sorted(texts, key=lambda text: (-len(text), text))
    pieces: set[str] = set()
    for text in filter(looks_like_random_text, secrets | encoded):
        pieces.update(_list_distinctive_pieces(text))
    if not ordered:
        return SecretSpellings(None, None, frozenset(pieces))
    return SecretSpellings(
        re.compile("|".join(map(re.escape, ordered))),
        re.compile("|".join(_LINE_BREAK_REGEX.join(map(re.escape, text)) for text in ordered)),
        frozenset(pieces),
        tuple(text.encode("latin-1") for text in ordered if max(text) <= "\xff"),
    )


def _merge_spans(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Stretches in order; those that overlap or touch are one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(stretches):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((max(start, 0), end))
    return merged


def _list_byte_grams(texts: Iterable[bytes]) -> set[bytes]:
    grams = set()
    for text in texts:
        for at in range(len(text) - _GRAM_BYTES + 1):
            grams.add(text[at : at + _GRAM_BYTES])
    return grams


def _build_gram_table(grams: set[bytes]) -> np.ndarray:
    import numpy as np

    known = np.zeros(1 << (32 - _HASH_SHIFT), dtype=bool)
    known[_hash_grams(np.frombuffer(b"".join(sorted(grams)), "<u4"))] = True
    return known


def _hash_grams(grams: np.ndarray) -> np.ndarray:
    import numpy as np

    return (grams * np.uint32(_HASH_FACTOR)) >> np.uint32(_HASH_SHIFT)


def _list_distinctive_pieces(secret: str) -> Iterator[str]:
    """The pieces of `secret` that no word has: with a digit among letters, or capitals among small
    letters."""
    for at in range(len(secret) - SECRET_PIECE_CHARS + 1):
        piece = secret[at : at + SECRET_PIECE_CHARS]
        letters = [letter for letter in piece if letter.isalpha()]
        has_digits = sum(letter.isdigit() for letter in piece) >= 2 and len(letters) >= 2
        has_cases = 2 <= sum(letter.isupper() for letter in letters) <= len(letters) - 2
        if has_digits or has_cases:
            yield piece


def _list_plain_spellings(secret: str) -> Iterable[str]:
    yield secret
    yield unquote(secret)
    yield quote(secret, safe="")
    yield quote(secret)
    yield quote_plus(secret)
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    # JSON that is a text in JSON.
    yield json.dumps(json.dumps(secret)[1:-1])[1:-1]
    yield repr(secret)[1:-1]
    yield repr(_encode_utf8(secret))[2:-1]
    yield " ".join(secret.split())


def _list_encodings(secret: str) -> Iterable[str]:
    raw = _encode_utf8(secret)
    for digits in (
        raw.hex(),
        "".join(f"%{byte:02x}" for byte in raw),
        "".join(f"\\x{byte:02x}" for byte in raw),
    ):
        yield digits
        yield digits.upper().replace("\\X", "\\x")
    yield raw.hex(" ")
    yield raw.hex(":")
    yield base64.b32encode(raw).decode().rstrip("=")
    # Letters of base64 stand for three bytes each, wherever the secret begins.
    for num_before in range(3):
        text = base64.b64encode(b"\0" * num_before + raw).decode().rstrip("=")
        start = -(-num_before * 8 // 6)
        end = (num_before + len(raw)) * 8 // 6
        yield text[start:end]
        yield text[start:end].translate(str.maketrans("+/", "-_"))


def _encode_utf8(secret: str) -> bytes:
    if secret.isprintable():
        return secret.encode("utf-8", "surrogateescape")
    return secret.encode("utf-8", "replace")
