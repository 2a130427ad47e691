"""The event file of one process: whole lines, also on a disk that is full for a while.

A line that the disk refuses is kept and written before the next one that it takes, so that a reader
sees all of them in order, also where the process has gone on to another attempt by then. What is
kept is bounded; what goes beyond is counted.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from pathlib import Path

from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.files import APPEND_FLAGS, open_regular_file_descriptor

MAX_UNWRITTEN_LINES = 2000  # in memory while the disk refuses them; then the oldest are dropped
# A look may be a question to a file server, and events come thousands a second.
PLACE_CHECK_INTERVAL_S = 1.0


class EventFile:
    """Appends lines to `path`. Whoever calls holds a lock: nothing here is for two threads.

    `earlier`: the file of the attempt before in this process, with lines that the disk refused. It
    is written first, and closed once it has them all. While it alone is refused (a file may be at
    its limit, or unreachable), this one gets its lines all the same.
    """

    def __init__(self, path: Path, earlier: EventFile | None = None) -> None:
        """Raises ResourceError if the file cannot be opened: a run must be recorded."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = open_regular_file_descriptor(path, APPEND_FLAGS)
        except OSError as error:
            raise build_path_resource_error(error, "opening the run's events", path) from None
        self.path = path
        # The user's code may change the directory.
        self._place, self._looked_s = path.absolute(), time.monotonic()
        self.refusal: OSError | None = None
        """What the disk said last; None once it has taken everything."""
        self._earlier = earlier
        self._kept: deque[bytes] = deque()
        self._num_dropped = 0
        # An earlier command may have been killed in the middle of its last line.
        self._is_torn = not _ends_with_whole_line(self._fd)

    @property
    def num_unwritten(self) -> int:
        """Lines that are in no file: neither in this one nor in an earlier one."""
        num_earlier = 0 if self._earlier is None else self._earlier.num_unwritten
        return num_earlier + self._num_dropped + len(self._kept)

    @property
    def has_kept_lines(self) -> bool:
        """True if lines of this file, or of an earlier one, wait for the disk to take them."""
        return bool(self._kept) or (self._earlier is not None and self._earlier.has_kept_lines)

    def append(self, line: str) -> bool:
        """True if the line, and all before it, are in this file; it is kept for later otherwise.

        Never raises.
        """
        if len(self._kept) >= MAX_UNWRITTEN_LINES:
            self._kept.popleft()
            self._num_dropped += 1
        self._kept.append(line.encode() + b"\n")
        self.write_kept_lines()
        return not self._kept

    def reopen_if_removed(self, *, now: bool = False) -> bool:
        """True if the file was removed or moved, or its folder, and another one is open in its
        place: what was written before is not there. Looks once a second, or `now`.

        Never raises, and makes no run directory: where that is gone, nothing is opened.
        """
        now_s = time.monotonic()
        if not now and now_s < self._looked_s + PLACE_CHECK_INTERVAL_S:
            return False
        self._looked_s = now_s
        try:
            if self._is_in_place():
                return False
            self._place.parent.mkdir(exist_ok=True)
            fd = open_regular_file_descriptor(self._place, APPEND_FLAGS)
        except OSError:
            # A file system that does not answer has removed nothing.
            return False
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._fd, self._is_torn = fd, not _ends_with_whole_line(fd)
        return True

    def _is_in_place(self) -> bool:
        """True where a file has its name: this process alone makes one. Not by its inode, whose
        number some file systems change."""
        try:
            os.stat(self._place)
        except FileNotFoundError:
            return False
        return True

    def write_kept_lines(self) -> bool:
        """Write what was kept, earlier files first. True if nothing is left. Never raises."""
        refusal = self._write_earlier()
        try:
            while self._kept:
                self._write_line_or_nothing(self._kept[0])
                self._kept.popleft()
        except OSError as error:
            refusal = error
        self.refusal = refusal
        return refusal is None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)
        if self._earlier is not None:
            self._earlier.close()

    def _write_earlier(self) -> OSError | None:
        """What the disk says while it refuses lines of the earlier file; None without any left."""
        if self._earlier is None:
            return None
        if not self._earlier.write_kept_lines():
            return self._earlier.refusal
        # What it dropped stays lost, and is told with what this file lost.
        self._num_dropped += self._earlier.num_unwritten
        self._earlier.close()
        self._earlier = None
        return None

    def _write_line_or_nothing(self, line: bytes) -> None:
        """Write a line as a whole or not at all: a part of it that found room is taken back."""
        data = line
        if self._is_torn:
            # Ends the part that could not be taken back: only that line is unreadable then.
            data = b"\n" + line
        num_written = 0
        try:
            # A write that finds room for a part alone returns its size: the next one says why.
            while num_written < len(data):
                num_written += os.write(self._fd, data[num_written:])
        except OSError:
            self._remove_last_write(num_written)
            raise
        self._is_torn = False

    def _remove_last_write(self, num_bytes: int) -> None:
        """Remove what was written last; where that is refused, the next line begins on a line of
        its own."""
        if num_bytes == 0:
            return
        try:
            # In append mode a write leaves the position at the end of the file.
            os.ftruncate(self._fd, os.lseek(self._fd, 0, os.SEEK_CUR) - num_bytes)
        except OSError:
            self._is_torn = True


def _ends_with_whole_line(fd: int) -> bool:
    """True also for an empty file, and where its last byte cannot be read."""
    try:
        size = os.fstat(fd).st_size
        return size == 0 or os.pread(fd, 1, size - 1) == b"\n"
    except OSError:
        return True
