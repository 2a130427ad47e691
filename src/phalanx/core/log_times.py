"""When each part of a log was written: a small file beside the log, which itself stays as it is.

C libraries and child processes write to the log's descriptor directly, where nobody can stamp their
lines. So the times say which bytes Python wrote when; what lies between two such parts was written
between the two times.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.files import APPEND_FLAGS, open_regular_file_descriptor

# Start and end in bytes of the log, seconds of the wall clock.
_LINE_PATTERN = re.compile(rb"(\d{1,15}) (\d{1,15}) (\d{1,11}\.\d{1,6})")


@dataclass(frozen=True)
class WrittenSpan:
    """Bytes `start` to `end` of a log, written at `time_unix_s`."""

    start: int
    end: int
    time_unix_s: float


def build_log_times_path(log: Path) -> Path:
    """The file with the times of `log`: rank-0000-attempt-00.log has rank-0000-attempt-00.times."""
    return log.with_suffix(".times")


class LogTimeWriter:
    """Appends a line to the file of times for each write to the log; a few microseconds each."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def open_for_log(cls, log: Path) -> LogTimeWriter | None:
        """The writer for `log`; None where its file cannot be opened: the log is worth more."""
        with contextlib.suppress(OSError):
            return cls(open_regular_file_descriptor(build_log_times_path(log), APPEND_FLAGS))
        return None

    def record_write(self, log_fd: int, num_bytes: int) -> None:
        """Record that the last `num_bytes` before the position of `log_fd` were written now.

        Never raises.
        """
        with contextlib.suppress(OSError):
            # In append mode a write leaves the position at its end.
            end = os.lseek(log_fd, 0, os.SEEK_CUR)
            os.write(self._fd, b"%d %d %.4f\n" % (end - num_bytes, end, time.time()))


def parse_log_times(lines: Iterable[bytes]) -> Iterator[WrittenSpan]:
    """The spans of a file of times; lines that are torn or of something else are passed over."""
    for line in lines:
        match = _LINE_PATTERN.fullmatch(line.strip())
        if match is not None and int(match[1]) <= int(match[2]):
            yield WrittenSpan(int(match[1]), int(match[2]), float(match[3]))
