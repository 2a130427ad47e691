"""The one seam between what a verb prints and the terminal: no secret passes it, and nothing that a
terminal obeys.

File names, checkpoints, data, exceptions and logs may be a stranger's, and any of them may end up
in a line that we print. So the streams themselves are filtered: `print`, warnings and tracebacks
pass without knowing of it. What draws (bars, colours) asks for the stream behind the filter with
`unwrap_stream`, and filters the texts that it draws.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

from phalanx.core.printable import escape_controls, printable_text
from phalanx.core.secrets import Redactor

STANDARD_STREAMS = {"<stdout>": "standard output", "<stderr>": "standard error"}
_COLOUR_CODE_PATTERN = re.compile(r"(\x1b\[(?:0|1|2|3[0-7])m)")


class FilteredTextStream:
    """A text stream that takes secrets and control characters out of what is written to it.

    Characters that its encoding lacks become question marks: no message is worth an exception.
    """

    def __init__(self, stream: TextIO) -> None:
        self.behind = stream
        self._redactor = Redactor(os.environ)

    def write(self, text: str) -> int:
        write_in_stream_encoding(self.behind, printable_text(self._redactor.redact_text(text)))
        return len(text)

    def flush(self) -> None:
        with _naming_refusing_stream(self.behind):
            self.behind.flush()

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    @property
    def buffer(self) -> io.RawIOBase:
        """The binary stream, for libraries that print bytes."""
        return _FilteredByteStream(self)

    def __getattr__(self, name: str) -> Any:
        """fileno, isatty, encoding, ...: the stream's own."""
        # copy and pickle ask before __init__ has set it: without this, over and over again.
        if name in ("behind", "detach"):
            raise AttributeError(name)
        return getattr(self.behind, name)


class _FilteredByteStream(io.RawIOBase):
    """The bytes of a text stream: filtered like its text."""

    def __init__(self, stream: FilteredTextStream) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._stream.write(bytes(data).decode("utf-8", "backslashreplace"))
        return len(data)


def filter_standard_streams() -> None:
    """Have standard output and error filtered from here on, once however often it is asked for."""
    sys.stdout, sys.stderr = wrap_stream_in_filter(sys.stdout), wrap_stream_in_filter(sys.stderr)


def wrap_stream_in_filter(stream: TextIO) -> TextIO:
    """The stream behind the filter, once however often it is asked for."""
    return cast(TextIO, FilteredTextStream(unwrap_stream(stream)))


@contextlib.contextmanager
def filtering_standard_streams() -> Iterator[None]:
    """Inside, standard output and error are filtered."""
    before = sys.stdout, sys.stderr
    filter_standard_streams()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def unwrap_stream(stream: TextIO) -> TextIO:
    """The stream behind the filter, for what draws."""
    if isinstance(stream, FilteredTextStream):
        return stream.behind
    return stream


def print_document(text: str, end: str = "\n") -> None:
    """Print JSON or TOML for programs, however long its lines are.

    Its secrets are the caller's to hide.
    """
    write_in_stream_encoding(unwrap_stream(sys.stdout), escape_controls(text) + end)


def print_coloured(text: str) -> None:
    """Print lines in which our own colours stand, and nothing else that a terminal obeys."""
    redacted = Redactor(os.environ).redact_text(text)
    # With a group in the pattern, split gives text and colour in turn, text first.
    parts = _COLOUR_CODE_PATTERN.split(redacted)
    parts[::2] = map(printable_text, parts[::2])
    write_in_stream_encoding(unwrap_stream(sys.stdout), "".join(parts) + "\n")


def should_use_colour() -> bool:
    """True on a terminal that can, unless NO_COLOR is set."""
    return (
        sys.stdout.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "") not in ("", "dumb")
    )


def write_in_stream_encoding(stream: TextIO, text: str) -> None:
    """Write `text` with question marks for what the stream's encoding lacks."""
    with _naming_refusing_stream(stream):
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, errors="replace").decode(encoding))


@contextlib.contextmanager
def _naming_refusing_stream(stream: TextIO) -> Iterator[None]:
    """Inside, an error by which the system refuses to write names the stream, as those of files
    name the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            name = getattr(stream, "name", None)
            error.filename = STANDARD_STREAMS.get(str(name), name)
        raise
