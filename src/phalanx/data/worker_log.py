"""What a loader worker prints: kept in a log of the run, and said in the rank when the worker dies.

Torch-free.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from phalanx.core.files import open_regular_file_for_append
from phalanx.core.places import open_unnamed_temporary_file

MAX_LOG_TAIL_BYTES = 64 * 1024  # of a log, from its end
MAX_LAST_LINE_CHARS = 300
# The beginning of faulthandler's report of a crash; the stack it ends with says little.
_FAULTHANDLER_PREFIX = "Fatal Python error"


class WorkerLog:
    """Standard output and error of one process.

    `path=None` keeps no file: all is said in the rank when it ends.
    """

    def __init__(self, name: str, path: Path | None) -> None:
        self.name, self.path = name, path
        self.file = _open_log_or_unnamed_file(path)
        # The log may go on from an earlier worker's.
        self._begin = self.file.seek(0, os.SEEK_END)

    def close(self, *, aloud: bool) -> str:
        """Close, and give the last line, or that of a crash.

        `aloud`: copy all to our own standard error, by name.
        """
        with self.file:
            size = self.file.seek(0, os.SEEK_END)
            self.file.seek(max(self._begin, size - MAX_LOG_TAIL_BYTES))
            text = self.file.read().decode(errors="replace")
        if self.path is not None and size == 0:
            self.path.unlink(missing_ok=True)
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        if lines and (aloud or self.path is None):
            report = "\n".join(f"[{self.name}] {line}" for line in lines)
            print(report, file=sys.stderr, flush=True)
        return _find_explanatory_line(lines)[:MAX_LAST_LINE_CHARS]


def _find_explanatory_line(lines: Sequence[str]) -> str:
    """The line that says why a process ended: the first of a crash, or else the last one."""
    for line in lines:
        if line.startswith(_FAULTHANDLER_PREFIX):
            return line.strip()
    if not lines:
        return ""
    return lines[-1].strip()


def _open_log_or_unnamed_file(path: Path | None) -> IO[bytes]:
    """The file to print to. Without a place for it (a full disk) it is an unnamed one.

    Raises ResourceError where that cannot be made, either.
    """
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return open_regular_file_for_append(path)
        except OSError as error:
            print(f"no {path}: {error.strerror}", file=sys.stderr)
    return open_unnamed_temporary_file()
