"""Text of others, made safe for any terminal."""

from __future__ import annotations

import unicodedata

TURNS_AROUND = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # marks of direction, embedded and isolated


def printable(text: str, limit: int = 2000) -> str:
    """One line without control characters: what a rank says must not move the cursor of whoever reads it, nor turn the
    order of letters around. Spaces and joiners of any script stay."""
    text = text.rstrip()
    line = "".join(letter if letter.isprintable() or _is_harmless(letter) else " " for letter in text[:limit])
    return line if len(text) <= limit else line[:-1] + "…"


def _is_harmless(letter: str) -> bool:
    return unicodedata.category(letter) in ("Zs", "Cf", "Co") and letter not in TURNS_AROUND
