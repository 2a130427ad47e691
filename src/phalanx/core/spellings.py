"""How a known secret may be spelled in a text: as it is, encoded, broken by a line's end, or a
piece of it.

What is found: the secret as it is and as URLs, JSON, Python's repr (of text and of bytes), base64
(also in something longer, as `user:password` is), base32, hex and percent-encoding write it; each
of these broken by line ends; and of a secret that looks random, any piece of PIECE_CHARS or more
that does. What is not: a shorter piece, a secret that was encrypted, compressed, hashed, turned
around, or encoded twice.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING
from urllib.parse import quote, quote_plus, unquote

from phalanx.core.url_secrets import looks_random

if TYPE_CHECKING:
    import numpy as np

HIDDEN = "***"
MIN_LENGTH = 8  # "1", "true" or "disabled" in place of a key must not blank out ordinary words
PIECE_CHARS = 12  # of a secret of 16 or more
_ENCODED_CHARS = 10  # of base64, where a secret is only a part of what was encoded
_WORD = re.compile(rf"[A-Za-z0-9_\-.+/=]{{{PIECE_CHARS},}}")
_BREAK = r"(?:[ \t]*\\?\r?\n[ \t>|]*)?"
_IN_BREAKS = b" \t\\\r\n>|"
# half of the shortest spelling: each has one that begins at a multiple of it, wherever it lies
_GRAM_BYTES = 4
_HASH_FACTOR, _HASH_SHIFT = 2654435761, 12
_ABOUT_A_BREAK = 96


@dataclass(frozen=True)
class Spellings:
    """The texts to look for. `pieces` are all substrings of PIECE_CHARS that stand for a secret."""

    whole: re.Pattern[str] | None
    broken: re.Pattern[str] | None
    pieces: frozenset[str]
    texts: tuple[bytes, ...] = ()
    """What `whole` looks for, as far as bytes that are read as latin-1 can hold it."""

    def places(self, data: bytes) -> list[tuple[int, int]]:
        """Stretches of `data` outside of which `spans` finds nothing: a look that is a hundred
        times quicker."""
        import numpy as np

        if not self.texts or len(data) < _GRAM_BYTES:
            return []
        reach = max(map(len, self.texts))
        grams = np.frombuffer(data, "<u4", len(data) // _GRAM_BYTES)
        hashes = _hashes(grams)
        short, long = (known[hashes] for known in self._known_grams)
        short[:-1] |= long[:-1] & long[1:]  # a long one has two beside each other
        stretches = [
            (at - reach, at + reach) for at in (np.flatnonzero(short) * _GRAM_BYTES).tolist()
        ]
        stretches += [
            (at - _ABOUT_A_BREAK - reach, at + _ABOUT_A_BREAK + reach) for at in self._breaks(data)
        ]
        merged: list[tuple[int, int]] = []
        for start, end in sorted(stretches):
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], end)
            else:
                merged.append((max(start, 0), end))
        return merged

    @cached_property
    def _known_grams(self) -> tuple[np.ndarray, np.ndarray]:
        """For short spellings and for long ones: by hash, True if one of them has such a gram."""
        return (
            _mark_known(_grams(text for text in self.texts if len(text) < 3 * _GRAM_BYTES - 1)),
            _mark_known(_grams(text for text in self.texts if len(text) >= 3 * _GRAM_BYTES - 1)),
        )

    @cached_property
    def _known_joints(self) -> frozenset[bytes]:
        return frozenset(_grams(text.translate(None, _IN_BREAKS) for text in self.texts))

    def _breaks(self, data: bytes) -> Iterator[int]:
        """Ends of lines across which a spelling may go on."""
        known, at = self._known_joints, data.find(b"\n")
        while at >= 0:
            before = data[max(at - _ABOUT_A_BREAK, 0) : at].translate(None, _IN_BREAKS)[-3:]
            after = data[at : at + _ABOUT_A_BREAK].translate(None, _IN_BREAKS)[:3]
            if (
                before[-2:] + after[:2] in known
                or before[-1:] + after in known
                or before + after[:1] in known
            ):
                yield at
            at = data.find(b"\n", at + 1)

    def hide(self, text: str) -> str:
        """`text` with HIDDEN in place of every secret that is found in it."""
        if self.whole is None:
            return text
        text = self.whole.sub(HIDDEN, text)
        if "\n" in text and self.broken is not None:
            text = self.broken.sub(HIDDEN, text)
        return _WORD.sub(self._hide_pieces, text) if self.pieces else text

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Spans of the secrets in `text`; some may overlap."""
        if self.whole is None:
            return
        for pattern in (self.whole, self.broken):
            yield from (
                (match.span() for match in pattern.finditer(text)) if pattern is not None else ()
            )
        for word in _WORD.finditer(text) if self.pieces else ():
            yield from (
                (word.start() + start, word.start() + end) for start, end in self._runs(word[0])
            )

    def _hide_pieces(self, match: re.Match[str]) -> str:
        word = match[0]
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
    written = {text for secret in secrets for text in _plain_forms(secret)}
    encoded = {text for secret in secrets for text in _encoded_forms(secret)}
    unbroken = [text for text in written if len(text) >= MIN_LENGTH] + [
        text for text in encoded if len(text) >= _ENCODED_CHARS
    ]
    ordered = sorted(set(unbroken), key=lambda text: (-len(text), text))
    random = [text for text in (*secrets, *encoded) if looks_random(text)]
    return Spellings(
        re.compile("|".join(map(re.escape, ordered))) if ordered else None,
        re.compile("|".join(_BREAK.join(map(re.escape, text)) for text in ordered))
        if ordered
        else None,
        frozenset(piece for text in random for piece in _pieces(text)),
        tuple(
            text.encode("latin-1") for text in ordered if all(ord(letter) < 256 for letter in text)
        ),
    )


def _grams(texts: Iterable[bytes]) -> set[bytes]:
    return {
        text[at : at + _GRAM_BYTES] for text in texts for at in range(len(text) - _GRAM_BYTES + 1)
    }


def _mark_known(grams: set[bytes]) -> np.ndarray:
    import numpy as np

    known = np.zeros(1 << (32 - _HASH_SHIFT), dtype=bool)
    known[_hashes(np.frombuffer(b"".join(sorted(grams)), "<u4"))] = True
    return known


def _hashes(grams: np.ndarray) -> np.ndarray:
    import numpy as np

    return (grams * np.uint32(_HASH_FACTOR)) >> np.uint32(_HASH_SHIFT)


def _pieces(secret: str) -> Iterator[str]:
    """The pieces of `secret` that no word has: with a digit among letters, or capitals among small
    letters."""
    for at in range(len(secret) - PIECE_CHARS + 1):
        piece = secret[at : at + PIECE_CHARS]
        letters = [letter for letter in piece if letter.isalpha()]
        has_digits = sum(letter.isdigit() for letter in piece) >= 2 and len(letters) >= 2
        has_cases = 2 <= sum(letter.isupper() for letter in letters) <= len(letters) - 2
        if has_digits or has_cases:
            yield piece


def _plain_forms(secret: str) -> Iterable[str]:
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


def _encoded_forms(secret: str) -> Iterable[str]:
    raw = _bytes_of(secret)
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
    for num_before in range(
        3
    ):  # letters of base64 stand for three bytes each, wherever the secret begins
        text = base64.b64encode(b"\0" * num_before + raw).decode().rstrip("=")
        start = -(-num_before * 8 // 6)
        end = (num_before + len(raw)) * 8 // 6
        yield text[start:end]
        yield text[start:end].translate(str.maketrans("+/", "-_"))


def _bytes_of(secret: str) -> bytes:
    return (
        secret.encode("utf-8", "surrogateescape")
        if secret.isprintable()
        else secret.encode("utf-8", "replace")
    )
