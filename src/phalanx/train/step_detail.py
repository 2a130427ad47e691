"""`StepDetail`: how much a rank writes of its steps, so that a run's event files stay small."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from phalanx.observe.events import Event, StepFinished, StepsSummed
from phalanx.plan.layout import Layout

# Of a run of 1,000 ranks and 100,000 steps: files that a laptop can hold and a page can read.
MAX_RUN_BYTES = 180_000_000
_LEAST_RANK_BYTES = 60_000
# Of what rank 0 writes, for the others together: where its steps alone are more than a run may
# have, two ranks of a long run must not be told in windows of a day.
_LEAST_SHARE_OF_OTHERS = 0.20
# More than one in all: lines are shorter than planned, and of the first and odd steps a run
# without a restart writes half.
_SHARE_OF_FIRST_STEPS, _SHARE_OF_WINDOWS, _SHARE_OF_ODD_STEPS = 0.25, 0.80, 0.25
BYTES_PER_STEP, BYTES_PER_AXIS = 950, 110
"""Of a line, with room, and what each axis that cuts the model or its sequences adds to it. Not of
lines as they are: all ranks must have the same windows."""
ODD_STEP_RATIO = 1.5
"""A step that takes so many times the mean of those before is written by itself."""


class StepDetail:
    """Turns the steps of one rank into the events that are written of them.

    Rank 0 writes each step, and so does every rank if all steps of the run fit into its part of
    MAX_RUN_BYTES. Else it writes the first steps, then sums over windows of equal length, and by
    themselves the steps in them that took ODD_STEP_RATIO times as long, while there is room. A rank
    that is killed loses the window that it was in. Restarts do not make the files larger by more
    than a window each: windows are as long as those of the whole run, and each attempt may write
    half as many first and odd steps as the one before.
    """

    def __init__(self, rank: int, layout: Layout, attempt: int, total_steps: int) -> None:
        degrees = layout.tp, layout.cp, layout.ep, layout.pp
        line_bytes = BYTES_PER_STEP + BYTES_PER_AXIS * sum(degree > 1 for degree in degrees)
        run_bytes = line_bytes * total_steps
        bytes_of_others = max(MAX_RUN_BYTES - run_bytes, int(_LEAST_SHARE_OF_OTHERS * run_bytes))
        rank_bytes = max(bytes_of_others // max(layout.world_size - 1, 1), _LEAST_RANK_BYTES)
        self._writes_each_step = rank == 0 or run_bytes <= rank_bytes
        # Halves of halves: all attempts together write no more than the share.
        share_of_attempt = 0.5 ** (attempt + 1)
        num_lines = rank_bytes / line_bytes
        self.num_first_steps = int(_SHARE_OF_FIRST_STEPS * num_lines * share_of_attempt)
        # A window's line is a little shorter than a step's.
        num_windows = max(int(_SHARE_OF_WINDOWS * num_lines), 1)
        self.window_steps = max(math.ceil(total_steps / num_windows), 1)
        self._num_odd_left = int(_SHARE_OF_ODD_STEPS * num_lines * share_of_attempt)
        self._num_seen, self._mean_s = 0, 0.0
        self._window = _Window()

    def list_events(self, event: StepFinished) -> list[Event]:
        """The events to write now, of this step or of those before."""
        if self._writes_each_step:
            return [event]
        self._num_seen += 1
        is_odd = self._num_seen > 1 and event.step_s > ODD_STEP_RATIO * self._mean_s
        self._mean_s += (event.step_s - self._mean_s) / self._num_seen
        if self._num_seen <= self.num_first_steps:
            return [event]
        written: list[Event] = []
        self._window.extend_to(event.step)
        if is_odd and self._num_odd_left > 0:
            self._num_odd_left -= 1
            written.append(event)
        else:
            self._window.add_step(event)
        # By the number of steps seen, not summed: windows of all ranks have the same borders.
        if (self._num_seen - self.num_first_steps) % self.window_steps == 0:
            written += self.flush()
        return written

    def flush(self) -> list[Event]:
        """The event of the window so far, which ends with it; none of an empty one."""
        window, self._window = self._window, _Window()
        if not window.num_steps:
            return []
        return [window.build_event()]


@dataclass
class _Window:
    """Sums over the steps from `first_step` to `last_step`, but for those that are written by
    themselves."""

    first_step: int = 0
    last_step: int = 0
    num_steps: int = 0
    longest: StepFinished | None = None
    step_s: float = 0.0
    unaccounted_s: float = 0.0
    cpu_s: float = 0.0
    phases_s: dict[str, float] = field(default_factory=dict)
    communication_s: dict[str, float] = field(default_factory=dict)
    rss_bytes: int = 0
    own_bytes: int = 0
    peak_bytes: int = 0

    def extend_to(self, step: int) -> None:
        self.first_step, self.last_step = self.first_step or step, step

    def add_step(self, event: StepFinished) -> None:
        self.num_steps += 1
        if self.longest is None or event.step_s > self.longest.step_s:
            self.longest = event
        self.step_s += event.step_s
        self.unaccounted_s += event.unaccounted_s
        self.cpu_s += event.cpu_s
        self.rss_bytes = max(self.rss_bytes, event.rss_bytes)
        self.own_bytes = max(self.own_bytes, event.own_bytes)
        self.peak_bytes = max(self.peak_bytes, event.peak_bytes)
        for sums, seconds_of in (
            (self.phases_s, event.phases_s),
            (self.communication_s, event.communication_s),
        ):
            for name, seconds in seconds_of.items():
                sums[name] = sums.get(name, 0.0) + seconds

    def build_event(self) -> StepsSummed:
        assert self.longest is not None
        return StepsSummed(
            first_step=self.first_step,
            last_step=self.last_step,
            num_steps=self.num_steps,
            step_s=round(self.step_s, 6),
            longest_s=round(self.longest.step_s, 6),
            longest_step=self.longest.step,
            phases_s={name: round(seconds, 6) for name, seconds in self.phases_s.items()},
            communication_s={
                name: round(seconds, 6) for name, seconds in self.communication_s.items()
            },
            unaccounted_s=round(self.unaccounted_s, 6),
            cpu_s=round(self.cpu_s, 6),
            rss_bytes=self.rss_bytes,
            peak_bytes=self.peak_bytes,
            own_bytes=self.own_bytes,
        )
