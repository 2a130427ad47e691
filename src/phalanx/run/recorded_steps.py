"""How long the steps of a run took, and how far its memory was from its plan, read from the events
that its ranks have on record.

Torch-free.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import UsageError
from phalanx.core.units import SMALL_BYTES, plural
from phalanx.observe.events import MemoryMeasured, StepFinished
from phalanx.observe.tail import read_recorded_events
from phalanx.plan.plan import Plan
from phalanx.plan.stored_plan import StoredPlanError

# The first steps take memory, open connections and choose kernels.
WARMUP_STEPS, LEAST_STEPS = 2, 3
# The phases in which a run spends what each group of a step's terms estimates.
PHASES_OF_GROUP = {
    "computing": ("forward", "backward"),
    "messages": ("collective", "pipeline"),
    "optimizer": ("optimizer",),
}


@dataclass(frozen=True)
class RecordedSteps:
    """Durations of a run's steps: medians over steps, in seconds by group (means over ranks), and
    the step of its slowest rank with the tenths at both ends."""

    num_steps: int
    step_s: float
    low_s: float
    high_s: float
    groups_s: dict[str, float]
    processor_s: float | None
    """Processor seconds of a rank in a step; None where steps do not say."""
    memory_ratio: float | None
    """Measured over predicted bytes of the rank where it is largest; None of a run that needs less
    than SMALL_BYTES, most of which allocators round up and libraries take once."""

    @property
    def unattributed_s(self) -> float:
        """Seconds of a step that no group has: data, hooks, waiting for a turn."""
        return max(0.0, self.step_s - sum(self.groups_s.values()))


def read_recorded_steps(run_dir: Path, plan: Plan) -> RecordedSteps:
    """The durations of steps recorded in `run_dir`. Raises UsageError where there are too few."""
    by_attempt = _read_steps_of_ranks(run_dir, plan.world_size)
    steps: list[list[StepFinished]] = []
    # Each attempt begins with steps that are slow, and may repeat some of the one before.
    for by_step in by_attempt.values():
        steps += [by_step[step] for step in sorted(by_step)][WARMUP_STEPS:]
    if len(steps) < LEAST_STEPS:
        num_steps = sum(map(len, by_attempt.values()))
        raise UsageError(
            f"the run has {plural(num_steps, 'step')} on record, and"
            f" {WARMUP_STEPS + LEAST_STEPS} are needed",
            where=str(run_dir),
            # Without any the events may as well be gone, or cut off.
            fix="train it a little longer" if num_steps else "give a run that has trained",
        )
    walls = sorted(max(event.step_s for event in ranks) for ranks in steps)
    tenth = len(walls) // 10
    return RecordedSteps(
        len(steps),
        statistics.median(walls),
        walls[tenth],
        walls[-1 - tenth],
        _compute_median_group_seconds(steps),
        _compute_median_processor_seconds(steps),
        _find_largest_memory_ratio(run_dir, plan.world_size),
    )


def _read_steps_of_ranks(run_dir: Path, num_ranks: int) -> dict[int, dict[int, list[StepFinished]]]:
    """By attempt the steps that rank 0 has on record, with what each rank says of them.

    Rank 0 records every step, the others in large runs only some: what they say of a step that it
    has lost is not the slowest rank's.
    """
    by_attempt: dict[int, dict[int, list[StepFinished]]] = {}
    silent_ranks: list[int] = []
    for rank in range(num_ranks):
        num_steps = 0
        for envelope in read_recorded_events(run_dir, StepFinished, rank=rank):
            if isinstance(envelope.event, StepFinished):
                _require_possible_seconds(envelope.event, rank, run_dir)
                num_steps += 1
                by_step = by_attempt.setdefault(envelope.attempt, {})
                if rank == 0 or silent_ranks or envelope.event.step in by_step:
                    by_step.setdefault(envelope.event.step, []).append(envelope.event)
        if not num_steps:
            silent_ranks.append(rank)
        if silent_ranks and rank > 0:
            break
    if silent_ranks and by_attempt:
        raise StoredPlanError(
            f"rank {silent_ranks[0]} has no step on record, and others have",
            where=str(run_dir / "events"),
            fix="give another run",
        )
    return by_attempt


def _require_possible_seconds(event: StepFinished, rank: int, run_dir: Path) -> None:
    """Raise StoredPlanError for durations that no clock says."""
    seconds = {"step_s": event.step_s, "cpu_s": event.cpu_s}
    seconds |= {f"phases_s.{phase}": phase_s for phase, phase_s in event.phases_s.items()}
    for name, duration_s in seconds.items():
        if not 0 <= duration_s < math.inf or not event.step_s:
            raise StoredPlanError(
                f"step {event.step} of rank {rank} has {name} {duration_s}",
                where=str(run_dir / "events"),
                why="no clock says so",
                fix="give another run",
            )


def _find_largest_memory_ratio(run_dir: Path, num_ranks: int) -> float | None:
    """Measured over predicted bytes, of the rank with most; None where no rank says both."""
    ratios = []
    for rank in range(num_ranks):
        for envelope in read_recorded_events(run_dir, MemoryMeasured, rank=rank):
            if isinstance(envelope.event, MemoryMeasured):
                ratios.append(_compute_memory_ratio(envelope.event))
    return max((ratio for ratio in ratios if ratio > 0), default=None)


def _compute_median_group_seconds(steps: Sequence[Sequence[StepFinished]]) -> dict[str, float]:
    """The median over steps of the seconds in each group of phases, a mean over ranks."""
    groups_s = {}
    for group, phases in PHASES_OF_GROUP.items():
        seconds = []
        for ranks in steps:
            seconds.append(statistics.mean(_sum_phase_seconds(event, phases) for event in ranks))
        groups_s[group] = statistics.median(seconds)
    return groups_s


def _compute_median_processor_seconds(steps: Sequence[Sequence[StepFinished]]) -> float | None:
    """The median processor seconds of a rank in a step; None where no step has them of all."""
    seconds = [
        statistics.mean(event.cpu_s or 0.0 for event in ranks)
        for ranks in steps
        if all(event.cpu_s for event in ranks)
    ]
    if not seconds:
        return None
    return statistics.median(seconds)


def _sum_phase_seconds(event: StepFinished, phases: Sequence[str]) -> float:
    return sum(event.phases_s.get(phase, 0.0) for phase in phases)


def _compute_memory_ratio(event: MemoryMeasured) -> float:
    """Measured over predicted bytes at the peak; 0 where these are few, or missing."""
    # Both have the sum at the worst moment beside the categories that it is made of.
    predicted = event.predicted_bytes.get("peak", 0)
    measured = event.measured_bytes.get("peak", 0)
    if min(predicted, measured) < SMALL_BYTES:
        return 0.0
    return measured / predicted
