"""The lines of all ranks' logs in order of time, attempt after attempt."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from phalanx.launch.rank_logs import LogLine, RankLogReader, list_rank_logs


def merge_log_lines(
    readers: Sequence[RankLogReader], *, with_torn_lines: bool = True
) -> Iterator[LogLine]:
    """The lines of the logs that were not read yet: by attempt, then by time, each log in its own
    order.

    Between machines the order is as good as their wall clocks. Lines without any time come first
    in their attempt, rank after rank.
    """
    by_attempt = sorted(readers, key=lambda reader: reader.attempt)
    for _, of_attempt in groupby(by_attempt, key=lambda reader: reader.attempt):
        streams = [_pair_with_sort_keys(reader, with_torn_lines) for reader in of_attempt]
        # The key leaves the line out: lines have no order, and times may be equal.
        for _, _, line in heapq.merge(*streams, key=lambda item: item[:2]):
            yield line


def _pair_with_sort_keys(
    reader: RankLogReader, with_torn_line: bool
) -> Iterator[tuple[float, int, LogLine]]:
    latest_s = -math.inf
    for line in reader.read_new_lines(with_torn_line=with_torn_line):
        # Never falls, so that a log keeps its order when a clock is set back.
        if math.isfinite(line.time_unix_s):
            latest_s = max(latest_s, line.time_unix_s)
        yield latest_s, reader.rank, line


class LogFollower:
    """Follows the logs of a run, or of one rank, while they grow and new attempts begin."""

    def __init__(self, run_dir: Path, rank: int | None = None) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._readers: dict[tuple[int, int], RankLogReader] = {}

    def read_new_lines(self, *, is_last: bool = False) -> Iterator[LogLine]:
        """The lines that were written since the last call; a line without its end waits for it
        unless `is_last`."""
        for reader in list_rank_logs(self._run_dir, self._rank):
            known = self._readers.setdefault((reader.attempt, reader.rank), reader)
            # The file of times may have appeared after the log.
            known.has_times |= reader.has_times
        return merge_log_lines(list(self._readers.values()), with_torn_lines=is_last)
