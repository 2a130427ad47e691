"""Measures, while a run goes on, what part of each hour counted, how often the run fails, and how
often it should save because of that. Torch-free."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from phalanx.checkpoint.writing.save_clock import compute_optimal_save_interval_s
from phalanx.observe.events import (
    CheckpointSaved,
    Envelope,
    RankFailed,
    ReliabilityMeasured,
    RunStarted,
    StepFinished,
    StepSkipped,
)
from phalanx.observe.skipped_steps import SkippedSteps
from phalanx.observe.time_groups import sum_productive_s

HOUR_S = 3600.0
# Steps that a failure may undo, at most; and saves whose cost is looked at.
_MAX_STEPS, _MAX_SAVES = 100_000, 100


@dataclass
class _Hour:
    """`step_s`: seconds of its steps that stand, without their waiting for data, saving and
    evaluating; `ranks` and `num_steps`: of these, the sum of the
    ranks that took part, and their number."""

    step_s: float = 0.0
    ranks: int = 0
    num_steps: int = 0


@dataclass(frozen=True)
class _Step:
    number: int
    seconds: float
    ranks: int
    hour: _Hour


class ReliabilityMeter:
    """Hears the events of one command, which began at `began_s` (monotonic seconds)."""

    def __init__(self, began_s: float, num_ranks: int) -> None:
        self._began_s, self._most_ranks, self._ranks = began_s, num_ranks, num_ranks
        self._hour = _Hour()
        self._number, self._hour_began_s = 0, began_s
        self._steps: deque[_Step] = deque(maxlen=_MAX_STEPS)
        self._skipped = SkippedSteps()
        self._num_failures = 0
        self._saves: deque[CheckpointSaved] = deque(maxlen=_MAX_SAVES)

    def add_event(self, envelope: Envelope) -> None:
        """Hear an event of rank 0 or of the supervisor."""
        match envelope.event:
            case RunStarted() as event:
                self._ranks = int(event.world_size)
                self._most_ranks = max(self._most_ranks, self._ranks)
                self._undo_steps_after(event.step)
            case StepSkipped():
                self._skipped.add_event(envelope)
            case StepFinished() as event if envelope.rank == 0:
                self._undo_steps_after(event.step - 1)
                good_s = 0.0
                # What was not applied did not get the run on.
                if self._skipped.find_skip(int(event.step), envelope.attempt) is None:
                    good_s = sum_productive_s(event.step_s, event.phases_s)
                step = _Step(event.step, good_s, self._ranks, self._hour)
                self._steps.append(step)
                self._count(step, 1)
            case RankFailed():
                self._num_failures += 1
            case CheckpointSaved() as event:
                self._saves.append(event)

    def take_hour(self, now_s: float) -> ReliabilityMeasured | None:
        """The event of an hour that is over; None while it goes on."""
        if now_s < self._hour_began_s + HOUR_S:
            return None
        measured = self._measure(now_s)
        self._number, self._hour_began_s, self._hour = self._number + 1, now_s, _Hour()
        return measured

    def take_end(self, now_s: float) -> ReliabilityMeasured | None:
        """The event of the hour in which the command ends; None for less than an hour without a
        failure, of which nothing could be said."""
        if not (self._number or self._num_failures):
            return None
        return self._measure(now_s)

    def _undo_steps_after(self, step: int) -> None:
        # A step that is done again stands in the hour of its last time.
        while self._steps and self._steps[-1].number > step:
            self._count(self._steps.pop(), -1)

    def _count(self, step: _Step, sign: int) -> None:
        step.hour.step_s += sign * step.seconds
        step.hour.ranks += sign * step.ranks
        step.hour.num_steps += sign

    def _measure(self, now_s: float) -> ReliabilityMeasured:
        alive_s, hour_s = now_s - self._began_s, now_s - self._hour_began_s
        between_s = alive_s / self._num_failures if self._num_failures else math.nan
        stall_s = best_s = participation = math.nan
        if self._saves:
            stall_s = statistics.median(save.stall_s for save in self._saves)
        if self._saves and self._num_failures:
            save_s = statistics.median(save.wall_s for save in self._saves)
            best_s = compute_optimal_save_interval_s(stall_s, save_s, between_s)
        if self._hour.num_steps:
            participation = self._hour.ranks / (self._hour.num_steps * self._most_ranks)
        return ReliabilityMeasured(
            hour=self._number,
            hour_s=hour_s,
            goodput=min(max(self._hour.step_s, 0.0) / hour_s, 1.0) if hour_s > 0 else 0.0,
            participation=participation,
            num_failures=self._num_failures,
            mean_between_failures_s=between_s,
            save_stall_s=stall_s,
            best_save_every_s=best_s,
        )
