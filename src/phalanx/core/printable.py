"""Text of others, made safe for any terminal."""

from __future__ import annotations

import re
import unicodedata

# Marks of direction, embedded and isolated: what follows one could be shown in another order.
BIDIRECTIONAL_CONTROL_CHARACTERS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
# More of one line tells nobody anything, and scrolls away what does.
MAX_PRINTABLE_LINE_CHARS = 8192
# At the end our own lines say what to do.
_KEPT_TAIL_CHARS = MAX_PRINTABLE_LINE_CHARS // 4
# An exception may hold a whole batch in its message.
_MAX_ERROR_MESSAGE_CHARS = 1 << 14
_CONTROL_CHARACTERS_PATTERN = re.compile(
    f"[\x7f-\x9f\u2028\u2029{BIDIRECTIONAL_CONTROL_CHARACTERS}\ud800-\udfff]"
)


def printable(text: str, limit: int = 2000) -> str:
    """One line without control characters: what a rank says must not move the cursor of whoever
    reads it, nor turn the order of letters around.

    Spaces and joiners of any script stay.
    """
    text = text.rstrip()
    line = _escape_control_characters(text[:limit])
    if len(text) <= limit:
        return line
    return line[:-1] + "…"


def printable_text(text: str) -> str:
    """Lines of text, each as `printable` makes it.

    Indents, tabs and blanks stay; of a line of more than MAX_PRINTABLE_LINE_CHARS the middle goes.
    """
    if text.isprintable() and len(text) <= MAX_PRINTABLE_LINE_CHARS:
        return text
    return "\n".join(_escape_and_shorten_line(line) for line in text.split("\n"))


def describe_foreign_error(error: BaseException) -> str:
    """ "ValueError: no room", of code that is not ours.

    Its `__str__` may raise, and of a message as long as a book the middle goes.
    """
    try:
        message = str(error)
    except Exception:
        # A broken `__str__` must not hide the error.
        message = "<its message cannot be printed>"
    num_more = len(message) - _MAX_ERROR_MESSAGE_CHARS
    if num_more > 0:
        half = _MAX_ERROR_MESSAGE_CHARS // 2
        message = f"{message[:half]} … {num_more:,} characters … {message[-half:]}"
    name = type(error).__name__
    return f"{name}: {message}" if message else name


def escape_controls(text: str) -> str:
    """JSON (or TOML) of the same value, with everything in its strings escaped that a terminal
    could obey."""
    return _CONTROL_CHARACTERS_PATTERN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _escape_and_shorten_line(line: str) -> str:
    num_more = len(line) - MAX_PRINTABLE_LINE_CHARS
    if num_more > 0:
        head, tail = line[: MAX_PRINTABLE_LINE_CHARS - _KEPT_TAIL_CHARS], line[-_KEPT_TAIL_CHARS:]
        line = f"{head} … {num_more:,} characters … {tail}"
    return "\t".join(_escape_control_characters(part) for part in line.split("\t"))


def _escape_control_characters(line: str) -> str:
    if line.isprintable():
        return line
    letters = list(line)
    for position, letter in enumerate(letters):
        if not _is_harmless_character(letter):
            letters[position] = " "
    return "".join(letters)


def _is_harmless_character(letter: str) -> bool:
    if letter.isprintable():
        return True
    # Blanks, joiners and icons of private fonts are not "printable" to Python.
    return (
        unicodedata.category(letter) in ("Zs", "Cf", "Co")
        and letter not in BIDIRECTIONAL_CONTROL_CHARACTERS
    )
