"""A process's own log: its standard output and error in a file, without the secrets of its
environment."""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import re
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from phalanx.core.files import open_regular_file_for_append
from phalanx.core.log_times import LogTimeWriter
from phalanx.core.secrets import Redactor, find_url_secret_spans
from phalanx.core.spellings import SecretSpellings, build_secret_spellings

# Windows overlap by more than a spelling of a secret can have: one that lies in two is found.
_WINDOW_BYTES, _OVERLAP_BYTES = 1 << 20, 1 << 16
_NOT_NEWLINE_PATTERN = re.compile(r"[^\n]")


def redirect_output_to_log(path: Path, redactor: Redactor, *, with_times: bool = False) -> None:
    """Point standard output and error at the end of `path`, standard input stays.

    What Python prints passes `redactor`. What C code and child processes print does not: see
    `overwrite_secrets_in_file`. `with_times`: when it was printed is kept beside the log
    (`core.log_times`).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_regular_file_for_append(path) as log:
        for target in (1, 2):
            # At the descriptors, so that C code and child processes write there, too.
            os.dup2(log.fileno(), target)
    times = None
    if with_times:
        times = LogTimeWriter.open_for_log(path)
    redact_standard_streams(redactor, times)


def redact_standard_streams(redactor: Redactor, times: LogTimeWriter | None = None) -> None:
    """Have `sys.stdout` and `sys.stderr` write whole lines to descriptors 1 and 2, each through
    `redactor`."""
    sys.stdout = RedactedStream(1, redactor, times)
    sys.stderr = RedactedStream(2, redactor, times)


class RedactedStream(io.TextIOWrapper):
    """A text stream that takes secrets out of what is written, line by line: one printed in two
    parts is found too."""

    def __init__(self, fd: int, redactor: Redactor, times: LogTimeWriter | None = None) -> None:
        # Descriptors 1 and 2 outlive this stream: other code writes to them as well.
        raw = open(fd, "wb", closefd=False)
        super().__init__(raw, encoding="utf-8", errors="backslashreplace")
        self._redactor = redactor
        self._times = times
        self._num_lost = 0
        # Each thread's line: no lock that a fork could inherit locked.
        self._begun = threading.local()

    @property
    def num_lost(self) -> int:
        """Writes that the disk refused: a log that cannot be written must not stop what it is
        the log of."""
        return self._num_lost

    def write(self, text: str) -> int:
        *lines, self._begun.line = (getattr(self._begun, "line", "") + text).split("\n")
        if lines:
            self._write_redacted_line(self._redactor.redact_text("\n".join(lines)) + "\n")
        return len(text)

    def flush(self) -> None:
        if line := getattr(self._begun, "line", ""):
            self._begun.line = ""
            self._write_redacted_line(self._redactor.redact_text(line))
        with contextlib.suppress(OSError):  # what somebody wrote into our buffer
            super().flush()

    def _write_redacted_line(self, text: str) -> None:
        """Past the buffer of TextIOWrapper, which would keep what the disk refuses and raise it
        again and again."""
        data = text.encode("utf-8", "backslashreplace")
        num_bytes = len(data)
        try:
            while data:
                # A write may take only a part: a full disk takes what fits before it refuses.
                data = data[os.write(self.fileno(), data) :]
        except OSError:
            self._num_lost += 1
        if self._times is not None:
            self._times.record_write(self.fileno(), num_bytes - len(data))


def overwrite_secrets_in_file(path: Path, secrets: Iterable[str], *, done_bytes: int = 0) -> int:
    """Overwrite each of `secrets`, and what URLs carry, in the file with stars, in place; the
    number of places.

    `done_bytes`: how much of the file this was done for before. Raises OSError.
    """
    size = path.stat().st_size
    # mmap refuses an empty file.
    if size == 0 or size == done_bytes:
        return 0
    with open_regular_file_for_append(path) as file, mmap.mmap(file.fileno(), 0) as content:
        known = tuple(secrets)
        # A shorter file is a new one. Otherwise a secret may lie half in what was done before.
        start = 0
        if done_bytes <= len(content):
            start = max(done_bytes - _OVERLAP_BYTES, 0)
        num_places = sum(
            _overwrite_occurrences(content, secret.encode(), start) for secret in known
        )
        # Windows are read as latin-1, a letter for each byte: secrets must be spelled so, too.
        in_letters = tuple(secret.encode("utf-8", "replace").decode("latin-1") for secret in known)
        return (
            num_places
            + _overwrite_spellings_of_secrets(
                content, build_secret_spellings((known, in_letters)), start
            )
            + _overwrite_url_secrets(content, content.rfind(b"\n", 0, start) + 1)
        )


def _overwrite_occurrences(content: mmap.mmap, secret: bytes, start: int) -> int:
    num_places, at = 0, content.find(secret, start)
    while at >= 0:
        # As many bytes as before: the file is changed in place, under whoever reads or appends.
        content[at : at + len(secret)] = b"*" * len(secret)
        num_places += 1
        at = content.find(secret, at + len(secret))
    return num_places


def _overwrite_spellings_of_secrets(content: mmap.mmap, known: SecretSpellings, first: int) -> int:
    """Encoded, broken by line ends, or a piece: a window after the other, which overlap by more
    than a secret has."""
    num_places = 0
    for window_start in range(first, len(content), _WINDOW_BYTES):
        window = content[window_start : window_start + _WINDOW_BYTES + _OVERLAP_BYTES]
        for span_start, span_end in known.find_stretches_to_search(window):
            # In latin-1 a byte is a letter: places in the text are places in the file.
            text = window[span_start:span_end].decode("latin-1")
            for start, end in known.find_secret_spans(text):
                # Lines stay lines.
                stars = _NOT_NEWLINE_PATTERN.sub("*", text[start:end])
                content[window_start + span_start + start : window_start + span_start + end] = (
                    stars.encode()
                )
                num_places += 1
    return num_places


def _overwrite_url_secrets(content: mmap.mmap, offset: int) -> int:
    num_places = 0
    content.seek(offset)
    for line in iter(content.readline, b""):
        for start, end in find_url_secret_spans(line.decode("latin-1")):  # a byte is a letter
            content[offset + start : offset + end] = b"*" * (end - start)
            num_places += 1
        offset += len(line)
    return num_places
