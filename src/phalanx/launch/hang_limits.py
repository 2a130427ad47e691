"""How long a run may go without progress before its ranks are judged: a limit for steps, which
follows how long the steps of this run take, and limits of its own for each kind of longer work."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from statistics import median

from phalanx.core.black_box_reader import LastPosition

# Shorter than the 5 s and ten steps within which a hang is to be reported: the last look, the
# verdict and the stacks take up to a second.
MIN_STEP_LIMIT_S = 4.0
NUM_SLOW_STEPS = 8
# Of longer work, without a sign of it: longer than a pause of a disk that works.
LONG_LIMIT_S = 60.0
# For a device that flushes what it was given, and for a compiler that works in this process: the
# longest for which a collective would wait.
PATIENT_LIMIT_S = 600.0
# For compilers in processes of their own that go on computing.
COMPILERS_LIMIT_S = 3600.0
# Of an attempt: allocations, first reads.
NUM_WARM_UP_STEPS = 3
# Of fewer nothing is said: the first take longer than others.
_MIN_DURATIONS, _NUM_NEWEST = 4, 8
_MAX_DURATIONS = 1000
_OPENING_PHASES = ("startup", "ckpt_load")
_SAVING_PHASES = ("ckpt_prepare", "ckpt_stage", "ckpt_write", "before_commit", "after_commit")
_EVALUATION_PHASES = ("evaluate",)
BETWEEN_STEPS_PHASES = (*_OPENING_PHASES, *_SAVING_PHASES, *_EVALUATION_PHASES)


@dataclass(frozen=True)
class HangSettings:
    """The settings of the watch. `hang_s`: seconds without progress in a step after which ranks are
    judged; None: by the steps of this run; 0: never. `long_s`: the same for longer work."""

    hang_s: float | None = None
    long_s: float = LONG_LIMIT_S

    @property
    def is_on(self) -> bool:
        return self.hang_s is None or self.hang_s > 0


@dataclass(frozen=True)
class HangLimit:
    """Seconds without progress after which ranks are judged (`quiet_s`), and after which one may
    be named that computes (`computes_s`), whose own child processes compute (`children_s`), or
    that waits for a disk (`disk_s`). With `counts_work` a sign of work (`work_signs`) is progress,
    too. `why`: for people."""

    quiet_s: float
    why: str
    computes_s: float
    children_s: float
    disk_s: float
    counts_work: bool


class StepDurations:
    """The durations of the newest steps of a run, from looks at the step that its ranks are in.

    Once some are known the first steps of a restart are kept apart: they are slow, and a hang after
    them would be found late.
    """

    def __init__(self) -> None:
        self._durations: deque[float] = deque(maxlen=_MAX_DURATIONS)
        self._step, self._since_s, self._warms_up = -1, 0.0, False
        # Of the attempt.
        self._warm_up_durations: list[float] = []
        self._num_after_warm_up = 0

    def begin_attempt(self) -> None:
        """The next steps are the first of an attempt."""
        self.forget_step()
        self._warm_up_durations = []
        self._num_after_warm_up = 0

    def forget_step(self) -> None:
        """The next step is no measure: something lies between the steps."""
        self._step = -1

    def observe(self, step: int, now_s: float, *, warms_up: bool = False) -> None:
        """Take note that the run was in `step`, seen at `now_s`; several steps since the look
        before share its seconds. `warms_up`: it is one of the first of the attempt."""
        if step == self._step:
            return
        num_steps = step - self._step
        if self._step >= 0 and num_steps > 0:
            self._add((now_s - self._since_s) / num_steps)
        self._step, self._since_s, self._warms_up = step, now_s, warms_up

    def _add(self, duration_s: float) -> None:
        if self._warms_up and len(self._durations) >= _NUM_NEWEST:
            self._warm_up_durations.append(duration_s)
        else:
            self._durations.append(duration_s)
            self._num_after_warm_up += 1

    def may_be_shorter_than(self, seconds: float) -> bool:
        """Whether the newest steps take less than `seconds`, or too few are known to say no."""
        newest = self._list_newest()
        return len(newest) < _MIN_DURATIONS or median(newest) < seconds

    def compute_long_step_s(self) -> float:
        """How long a step of this run may take, by those that are known: their 99th percentile (the
        longest of fewer than a hundred), or what steps take now, if that is longer; 0 before any is
        known."""
        if not self._durations:
            return 0.0
        ordered = sorted(self._durations)
        p99_s = ordered[math.ceil(0.99 * len(ordered)) - 1]
        return max(p99_s, self._compute_step_of_now_s())

    def _compute_step_of_now_s(self) -> float:
        """Steps of this attempt may take longer than all before: fewer ranks, a cold cache."""
        if self._warm_up_durations and self._num_after_warm_up < _MIN_DURATIONS:
            return min(self._warm_up_durations)
        of_attempt = self._list_newest()[: self._num_after_warm_up]
        return median(of_attempt) if of_attempt else 0.0

    def _list_newest(self) -> list[float]:
        return list(islice(reversed(self._durations), _NUM_NEWEST))


def choose_limit(
    settings: HangSettings, positions: Mapping[int, LastPosition], num_ranks: int, p99_s: float
) -> HangLimit:
    """The limit for ranks that are at `positions`: that of whatever may take longest."""
    step_limit_s = max(MIN_STEP_LIMIT_S, NUM_SLOW_STEPS * p99_s)
    why = f"steps of this run take up to {p99_s:.2g} s; resilience.hang_s sets another"
    if settings.hang_s is not None:
        step_limit_s, why = settings.hang_s, "resilience.hang_s"
    long_s = max(settings.long_s, step_limit_s)
    patient_s, compilers_s = max(PATIENT_LIMIT_S, long_s), max(COMPILERS_LIMIT_S, long_s)
    phases = [position.phase for position in positions.values()]
    if any(map(is_compiling, positions.values())):
        return HangLimit(long_s, "code is compiled", patient_s, compilers_s, long_s, True)
    if len(positions) < num_ranks:
        return HangLimit(long_s, "ranks start", long_s, patient_s, patient_s, True)
    for phase in phases:
        # Data may be opened by processes of the user's own.
        if phase in _OPENING_PHASES:
            return HangLimit(long_s, f"phase {phase}", long_s, patient_s, patient_s, True)
    for phase in phases:
        if phase in _SAVING_PHASES:
            return HangLimit(long_s, f"phase {phase}", long_s, long_s, patient_s, True)
    for phase in phases:
        if phase in _EVALUATION_PHASES:
            return HangLimit(long_s, f"phase {phase}", long_s, long_s, long_s, True)
    if not have_warmed_up(positions.values()):
        why = f"fewer than {NUM_WARM_UP_STEPS} steps are done"
        return HangLimit(long_s, why, long_s, long_s, long_s, True)
    # What waits for a disk, or a loader's worker that runs, waits for something that works.
    return HangLimit(step_limit_s, why, step_limit_s, long_s, long_s, False)


def is_compiling(position: LastPosition) -> bool:
    return position.header is not None and position.header.is_compiling


def have_warmed_up(positions: Iterable[LastPosition]) -> bool:
    """Whether the ranks at `positions` have done the first steps of their attempt."""
    return all(
        position.header is not None and position.header.num_steps_begun > NUM_WARM_UP_STEPS
        for position in positions
    )
