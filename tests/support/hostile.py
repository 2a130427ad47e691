"""Names and texts that try to move the cursor of whoever reads them."""

from __future__ import annotations

import re

# The title, a cleared screen, a link, the clipboard, an 8-bit escape, letters turned around, a line
# written over.
EVIL = "\x1b]0;t\x07\x1b[2J\x1b]8;;http:e\x1b\\[red]x[/red]\x1b]52;c;eA==\x07\x9b31m\u202ea\u2066b\rc\x08\x7f\udc80"
EVIL_NAME = EVIL.replace("/", "")  # of a file; EVIL[:-1] is valid Unicode
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def moves_a_cursor(text: str) -> list[str]:
    """What a terminal would obey in `text`, a few letters around it; nothing for what is safe to
    show."""
    return [
        ascii(text[max(0, found.start() - 20) : found.end() + 20])
        for found in _OBEYED.finditer(text)
    ]
