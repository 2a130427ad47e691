"""How long a run may go without progress before its ranks are judged: a limit for steps, which
follows how long the steps of this run take, and longer ones for what is no step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from phalanx.core.black_box_reader import LastPosition

# Shorter than the 5 s and ten steps within which a hang is to be reported: the last look, the
# verdict and the stacks take up to a second.
MIN_STEP_LIMIT_S = 4.0
NUM_SLOW_STEPS = 8
# Before the first steps, in evaluations and saves: longer than a pause of a disk that works.
LONG_LIMIT_S = 60.0
# There, and while code is compiled, as long as a rank goes on computing, reading or writing: the
# longest for which a collective would wait.
BUSY_LIMIT_S = 600.0
# Of an attempt: allocations, first reads, compilation.
NUM_WARM_UP_STEPS = 3
_MAX_DURATIONS = 1000
# Phases of which one may take much longer than a step without any sign. In those of the second list
# a rank may also compute, read or write for long.
_LONG_PHASES = ("evaluate",)
_BUSY_PHASES = (
    "startup",
    "ckpt_load",
    "ckpt_prepare",
    "ckpt_stage",
    "ckpt_write",
    "before_commit",
    "after_commit",
)


@dataclass(frozen=True)
class HangSettings:
    """The settings of the watch. `hang_s`: seconds without progress in a step after which ranks are
    judged; None: by the steps of this run; 0: never. `compiles`: steps may compile code."""

    hang_s: float | None = None
    compiles: bool = False

    @property
    def is_on(self) -> bool:
        return self.hang_s is None or self.hang_s > 0


@dataclass(frozen=True)
class HangLimit:
    """Seconds without progress: `quiet_s` if no rank does anything that can be seen, `busy_s` if
    one computes, reads or writes. `why`: for people."""

    quiet_s: float
    busy_s: float
    why: str


class StepDurations:
    """The durations of the newest steps of a run, from looks at the step that its ranks are in."""

    def __init__(self) -> None:
        self._durations: deque[float] = deque(maxlen=_MAX_DURATIONS)
        self._step, self._since_s = -1, 0.0

    def forget_step(self) -> None:
        """The next step is no measure: an attempt begins, or something lies between the steps."""
        self._step = -1

    def observe(self, step: int, now_s: float) -> None:
        """Take note that the run was in `step`, seen at `now_s`; several steps since the look
        before share its seconds."""
        if step == self._step:
            return
        num_steps = step - self._step
        if self._step >= 0 and num_steps > 0:
            self._durations.append((now_s - self._since_s) / num_steps)
        self._step, self._since_s = step, now_s

    def compute_p99_s(self) -> float:
        """The 99th percentile; the longest of fewer than a hundred steps, 0 of none."""
        if not self._durations:
            return 0.0
        ordered = sorted(self._durations)
        return ordered[math.ceil(0.99 * len(ordered)) - 1]


def choose_limit(
    settings: HangSettings, positions: Mapping[int, LastPosition], num_ranks: int, p99_s: float
) -> HangLimit:
    """The limit for ranks that are at `positions`: that of whatever may take longest."""
    step_limit_s = max(MIN_STEP_LIMIT_S, NUM_SLOW_STEPS * p99_s)
    why = f"steps of this run take up to {p99_s:.2g} s"
    if settings.hang_s is not None:
        step_limit_s, why = settings.hang_s, "resilience.hang_s"
    long_s, busy_s = max(LONG_LIMIT_S, step_limit_s), max(BUSY_LIMIT_S, step_limit_s)
    phases = [position.phase for position in positions.values()]
    if len(positions) < num_ranks:
        return HangLimit(long_s, busy_s, "ranks start")
    for phase in phases:
        if phase in _BUSY_PHASES:
            return HangLimit(long_s, busy_s, f"phase {phase}")
    if settings.compiles:
        return HangLimit(long_s, busy_s, "train.compile")
    for phase in phases:
        if phase in _LONG_PHASES:
            return HangLimit(long_s, long_s, f"phase {phase}")
    if not _have_warmed_up(positions.values()):
        return HangLimit(long_s, long_s, f"fewer than {NUM_WARM_UP_STEPS} steps are done")
    return HangLimit(step_limit_s, step_limit_s, why)


def _have_warmed_up(positions: Iterable[LastPosition]) -> bool:
    return all(
        position.header is not None and position.header.num_steps_begun > NUM_WARM_UP_STEPS
        for position in positions
    )
