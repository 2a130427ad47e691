"""The logs of a run's ranks, read line by line with the time of each line, also while they grow."""

from __future__ import annotations

import errno
import math
import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.core.files import open_regular_file
from phalanx.core.log_times import WrittenSpan, build_log_times_path, parse_log_times
from phalanx.launch.output_destination import list_output_destinations
from phalanx.launch.paths import LOGS

RANK_LOG_PATTERN = re.compile(r"rank-(\d{1,9})-attempt-(\d{1,9})\.log")
# A line that is longer is given in pieces of this size.
_CHUNK_BYTES = 256 * 2**10
_TIMES_CHUNK_BYTES = 64 * 2**10


@dataclass(frozen=True)
class LogLine:
    """A line of a rank's log, without its end.

    `time_unix_s`: when it was written. `is_exact` is False where a C library or a child process
    wrote it: then not before that time, and not after `before_unix_s`. NaN where the log has no
    times.
    """

    rank: int
    attempt: int
    text: str
    time_unix_s: float = math.nan
    is_exact: bool = False
    before_unix_s: float = math.nan

    @property
    def latest_unix_s(self) -> float:
        """The latest moment at which it may have been written; NaN where nobody knows."""
        if self.is_exact:
            return self.time_unix_s
        return self.before_unix_s


@dataclass
class RankLogReader:
    """Reads one log from where it stopped before; no file stays open between two reads."""

    rank: int
    attempt: int
    path: Path
    has_times: bool
    _offset: int = 0
    _times_offset: int = 0
    _spans: deque[WrittenSpan] = field(default_factory=deque)
    _passed: WrittenSpan | None = None

    def read_new_lines(self, *, with_torn_line: bool = False) -> Iterator[LogLine]:
        """The lines that were written since the last call; `with_torn_line`: also a last one
        without its end. A log that cannot be read has none."""
        while True:
            self._offset = _find_data_from(self.path, self._offset)
            data = self._read_piece(self.path, self._offset, _CHUNK_BYTES)
            size = data.rfind(b"\n") + 1
            if size == 0 and (len(data) == _CHUNK_BYTES or with_torn_line):
                size = len(data)
            if size == 0:
                return
            at = self._offset
            self._offset += size
            # Not splitlines: a progress bar's carriage returns end no line.
            for line in data[:size].removesuffix(b"\n").split(b"\n"):
                yield self._build_line(at, line)
                at += len(line) + 1

    def _build_line(self, at: int, line: bytes) -> LogLine:
        text = line.decode("utf-8", "replace")
        following = self._find_span_after(at)
        if following is not None and following.start <= at:
            return LogLine(self.rank, self.attempt, text, following.time_unix_s, is_exact=True)
        if not self.has_times:
            return LogLine(self.rank, self.attempt, text)
        before_s = self._read_modified_s()
        if following is not None:
            before_s = following.time_unix_s
        after_s = before_s
        if self._passed is not None:
            after_s = self._passed.time_unix_s
            # The kernel's clock of files ticks a few hundred times a second.
            before_s = max(before_s, after_s)
        return LogLine(self.rank, self.attempt, text, after_s, before_unix_s=before_s)

    def _find_span_after(self, at: int) -> WrittenSpan | None:
        """The first span that ends after byte `at`."""
        while True:
            if not self._spans and not self._read_more_spans():
                return None
            if self._spans[0].end > at:
                return self._spans[0]
            self._passed = self._spans.popleft()

    def _read_more_spans(self) -> bool:
        if not self.has_times:
            return False
        path = build_log_times_path(self.path)
        data = self._read_piece(path, self._times_offset, _TIMES_CHUNK_BYTES)
        size = data.rfind(b"\n") + 1
        self._times_offset += size
        self._spans.extend(parse_log_times(data[:size].split(b"\n")))
        return bool(self._spans)

    def _read_modified_s(self) -> float:
        """When the log was written to last; NaN where it is gone."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return math.nan

    def _read_piece(self, path: Path, offset: int, num_bytes: int) -> bytes:
        try:
            with open_regular_file(path) as file:
                # Shorter than before: another file has the name now.
                if os.fstat(file.fileno()).st_size < offset:
                    return b""
                file.seek(offset)
                return file.read(num_bytes)
        except OSError:
            return b""


def _find_data_from(path: Path, offset: int) -> int:
    """Where the file has data from `offset` on; `offset` where it has none, or cannot be told.

    Whoever cuts a log that is written to (logrotate's copytruncate) leaves a hole of its old size
    in it, of which each byte would be read as text.
    """
    try:
        with open_regular_file(path, buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if offset < size and hasattr(os, "SEEK_DATA"):
                return _seek_data(file.fileno(), offset, size)
    except OSError:
        # Whoever reads it finds nothing, either.
        pass
    return offset


def _seek_data(fd: int, offset: int, size: int) -> int:
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        # A hole up to the end.
        if error.errno == errno.ENXIO:
            return size
        # A file system that knows no holes.
        return offset


def list_rank_logs(run_dir: Path, rank: int | None = None) -> list[RankLogReader]:
    """A reader for each log of `run_dir`, or of one rank alone, by attempt and rank.

    Those of ranks that another launcher started are files of its own, if they can be read here.
    """
    readers: dict[tuple[int, int], RankLogReader] = {}
    for destination in list_output_destinations(run_dir):
        path = destination.readable_log
        if path is not None and rank in (None, destination.rank):
            key = destination.attempt, destination.rank
            readers[key] = RankLogReader(destination.rank, destination.attempt, path, False)
    try:
        names = os.listdir(run_dir / LOGS)
    except OSError:
        names = []
    existing = set(names)
    for name in names:
        match = RANK_LOG_PATTERN.fullmatch(name)
        if match is None or rank not in (None, int(match[1])):
            continue
        path = run_dir / LOGS / name
        has_times = build_log_times_path(path).name in existing
        readers[int(match[2]), int(match[1])] = RankLogReader(
            int(match[1]), int(match[2]), path, has_times
        )
    return [readers[key] for key in sorted(readers)]
