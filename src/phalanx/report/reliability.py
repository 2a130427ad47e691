"""How often a run failed, what part of it counted, and how often it should save because of that."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from phalanx.checkpoint.writing.save_clock import compute_optimal_save_interval_s
from phalanx.observe import events
from phalanx.observe.events import Envelope
from phalanx.observe.failure_rate import MIN_FAILURES_OF_A_RATE, bound_time_between_failures
from phalanx.report.timeline import RunTimeline

if TYPE_CHECKING:
    from phalanx.report.facts import RunAttempt


@dataclass(frozen=True)
class Reliability:
    """Numbers on a run's failures. Seconds, NaN where they are not known.

    `goodput`: the share of the run's life in steps that stand and were applied, without their
    waiting for data, saves and evaluations. `participation`: over the steps that stand, the mean
    share that took part of the ranks that their command had. `alive_s`: the run's life;
    `mean_between_failures_s`: that by the number of its failures, of which one alone gives no mean;
    `num_cut_off`: commands that ended without a word before the run was resumed (a machine that was
    lost, say), which are none of these. `save_every_s`: the median between two saves;
    `best_save_every_s`: what Young and Daly want for that rate of failures and the cost of these
    saves. `hours`: those that the supervisor measured; none of less than one without a failure.
    """

    goodput: float
    participation: float
    alive_s: float
    num_failures: int
    mean_between_failures_s: float
    save_stall_s: float
    save_every_s: float
    best_save_every_s: float
    num_cut_off: int = 0
    hours: tuple[events.ReliabilityMeasured, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Facts of `phalanx report --json`, numbers that are not known as null; with the 95 %
        interval of the mean time between failures."""
        values = {name: value for name, value in vars(self).items() if name != "hours"}
        bounds = bound_time_between_failures(self.num_failures, self.alive_s)
        return {
            **{name: _number_or_none(value) for name, value in values.items()},
            "mean_between_failures_interval_s": [_number_or_none(bound) for bound in bounds],
            "hours": [_describe_hour(hour) for hour in self.hours],
        }


def measure_reliability(
    story: Sequence[Envelope],
    timeline: RunTimeline,
    attempts: Sequence[RunAttempt],
    attempt_of_step: Mapping[int, int],
    good_s: float,
) -> Reliability:
    """`story`: what happened, in order; `attempt_of_step`: of the steps that stand; `good_s`:
    their seconds."""
    num_failures = sum(isinstance(e.event, events.RankFailed) for e in story)
    # Another launcher starts ranks again because one of them failed.
    num_failures += sum(attempt.is_by_launcher for attempt in attempts)
    mtbf_s = math.nan
    if num_failures >= MIN_FAILURES_OF_A_RATE:
        mtbf_s = timeline.alive_s / num_failures
    saves = [e for e in story if isinstance(e.event, events.CheckpointSaved)]
    stalls, durations = [], []
    for envelope in saves:
        if isinstance(envelope.event, events.CheckpointSaved):
            stalls.append(envelope.event.stall_s)
            durations.append(envelope.event.wall_s)
    times = [timeline.elapsed_s(envelope) for envelope in saves]
    stall_s = _find_median(stalls)
    best_s = math.nan
    if math.isfinite(stall_s) and math.isfinite(mtbf_s):
        duration_s = _find_median(durations)
        best_s = compute_optimal_save_interval_s(stall_s, duration_s, mtbf_s)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return Reliability(
        goodput=good_s / timeline.alive_s if timeline.alive_s > 0 else math.nan,
        participation=_measure_participation(attempts, attempt_of_step),
        alive_s=timeline.alive_s,
        num_failures=num_failures,
        mean_between_failures_s=mtbf_s,
        save_stall_s=stall_s,
        save_every_s=_find_median(gaps),
        best_save_every_s=best_s,
        num_cut_off=timeline.num_cut_off,
        hours=tuple(e.event for e in story if isinstance(e.event, events.ReliabilityMeasured)),
    )


def _describe_hour(hour: events.ReliabilityMeasured) -> dict[str, float | None]:
    facts = {name: _number_or_none(value) for name, value in asdict(hour).items()}
    if hour.num_failures < MIN_FAILURES_OF_A_RATE:
        # The event has the quotient of one failure, too.
        facts |= dict.fromkeys(("mean_between_failures_s", "best_save_every_s"))
    return facts


def _number_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _measure_participation(
    attempts: Sequence[RunAttempt], attempt_of_step: Mapping[int, int]
) -> float:
    sizes = _list_sizes_and_most_of_command(attempts)
    counted = [sizes[number] for number in attempt_of_step.values() if number in sizes]
    num_asked_for = sum(most for _, most in counted)
    return sum(size for size, _ in counted) / num_asked_for if num_asked_for > 0 else math.nan


def _list_sizes_and_most_of_command(
    attempts: Sequence[RunAttempt],
) -> dict[int, tuple[int, int]]:
    """By attempt its ranks, and the most that any attempt of its command had: who resumes a run
    with fewer ranks has lost none."""
    commands: list[dict[int, int]] = []
    for attempt in attempts:
        if not attempt.is_restart or not commands:
            commands.append({})
        if attempt.started is not None:
            commands[-1][attempt.number] = int(attempt.started.world_size)
    return {
        number: (size, max(command.values()))
        for command in commands
        for number, size in command.items()
    }


def _find_median(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan
