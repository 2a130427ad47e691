"""`RankTail`: the newest steps of one rank, from the end of its event file."""

from __future__ import annotations

import bisect
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.core.files import open_regular_file, read_bounded_lines
from phalanx.observe.events import StepFinished, StepsSummed
from phalanx.observe.tail import parse_valid_event_line

_MARK = b'"event":"step'  # of step_finished and steps_summed


@dataclass
class RankTail:
    """The newest steps of one rank: those written each, by step, and sums by (first, last)."""

    steps: dict[int, StepFinished] = field(default_factory=dict)
    windows: dict[tuple[int, int], StepsSummed] = field(default_factory=dict)
    _ordered: list[int] = field(default_factory=list)

    def add_event(self, event: StepFinished | StepsSummed) -> None:
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
        event = envelope.event if envelope is not None else None
        if isinstance(event, StepFinished | StepsSummed):
            tail.add_event(event)
    return tail
