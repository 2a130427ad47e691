"""`RankTail`: the newest steps of one rank, from the end of its event file."""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.core.files import open_regular_file, read_bounded_lines
from phalanx.observe.events import Event, StepFinished, StepsSummed
from phalanx.observe.tail import parse_valid_event_line

_MARK = b'"event":"step'  # of step_finished and steps_summed
_SUM_MARK = b'"event":"steps_summed"'
_LOOKED_AT_BYTES = 16 * 2**10
MAX_STEPS_PER_RANK = 2_000
# Rows of all ranks together: what a page may spend on them is about two seconds.
MAX_ROWS = 200_000
BYTES_PER_STEP = 1_024  # of a line that is written today, with room
MAX_LEAD_BYTES = 64 * 2**20


@dataclass
class RankTail:
    """The newest steps of one rank: those written each, by step, and sums by (first, last)."""

    steps: dict[int, StepFinished] = field(default_factory=dict)
    windows: dict[tuple[int, int], StepsSummed] = field(default_factory=dict)
    _ordered: list[int] = field(default_factory=list)

    def add_event(self, event: Event) -> None:
        """Add a step or a sum of steps; what is neither, or took no time, is left out."""
        if not isinstance(event, StepFinished | StepsSummed):
            return
        if not (math.isfinite(event.step_s) and event.step_s > 0):
            return
        if isinstance(event, StepFinished):
            self.steps[int(event.step)] = event
        elif 1 <= event.num_steps <= event.last_step - event.first_step + 1:
            self.windows[int(event.first_step), int(event.last_step)] = event

    def covers(self, window: tuple[int, int]) -> bool:
        """True if the window is summed, or both its ends are among the steps."""
        first, last = window
        return window in self.windows or (first in self.steps and last in self.steps)

    def _ordered_steps_between(self, first: int, last: int) -> list[int]:
        if len(self._ordered) != len(self.steps):
            self._ordered = sorted(self.steps)
        start, end = (
            bisect.bisect_left(self._ordered, first),
            bisect.bisect_right(self._ordered, last),
        )
        return self._ordered[start:end]

    def list_events_within(self, window: tuple[int, int]) -> list[StepFinished | StepsSummed]:
        first, last = window
        within: list[StepFinished | StepsSummed] = [
            self.steps[step] for step in self._ordered_steps_between(first, last)
        ]
        if window in self.windows:
            within.append(self.windows[window])
        return within


def read_rank_tail(path: Path, num_bytes: int) -> RankTail:
    """The steps and windows in the last `num_bytes` of a rank's file."""
    tail = RankTail()
    try:
        with open_regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > num_bytes:
                file.seek(size - num_bytes)
                # The line that the cut went through.
                file.readline(num_bytes)
            lines = [line for line in read_bounded_lines(file) if _MARK in line]
    except OSError:
        return tail
    for line in lines:
        envelope = parse_valid_event_line(line)
        if envelope is not None:
            tail.add_event(envelope.event)
    return tail


def count_steps_per_rank(num_ranks: int) -> int:
    """How many of the newest steps of each rank are looked at."""
    return max(min(MAX_STEPS_PER_RANK, MAX_ROWS // num_ranks), 1)


def choose_tail_bytes(files: Sequence[tuple[int, int, Path]]) -> dict[Path, int]:
    """By path of the newest attempt's files, of `files` (rank, attempt, path): the bytes at its end
    that have its newest steps. Of the first rank more where others wrote sums of steps, as it wrote
    each step of them."""
    of_ranks = [file for file in files if file[0] >= 0]
    newest = max((attempt for _, attempt, _ in of_ranks), default=0)
    paths = {rank: path for rank, attempt, path in of_ranks if attempt == newest}
    if not paths:
        return {}
    num_bytes = count_steps_per_rank(len(paths)) * BYTES_PER_STEP
    tail_bytes = dict.fromkeys(paths.values(), num_bytes)
    if _has_sums(paths[max(paths)]):
        tail_bytes[paths[min(paths)]] = MAX_LEAD_BYTES
    return tail_bytes


def _has_sums(path: Path) -> bool:
    try:
        with open_regular_file(path) as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _LOOKED_AT_BYTES, 0))
            return _SUM_MARK in file.read(_LOOKED_AT_BYTES)
    except OSError:
        return False
