"""Ranks that the others wait for, where it is no single one, or not for long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from phalanx.report.bottleneck.cause import MIN_EXPLAINED_SHARE, MIN_SHARE, Cause
from phalanx.report.bottleneck.few_steps import describe_few_steps
from phalanx.report.bottleneck.study import StepStudy
from phalanx.report.bottleneck.what_if import calculate_speedup
from phalanx.report.formats import format_milliseconds, format_percent

_MAX_NAMED_RANKS = 8


@dataclass(frozen=True)
class Lateness:
    """Of each step the rank of `group` that is the latest, and the seconds that it is behind the
    median of them."""

    group: tuple[int, ...]
    ranks: Sequence[int]
    seconds: Sequence[float]

    @cached_property
    def total_s(self) -> float:
        return sum(self.seconds)

    def sum_by_rank(self) -> dict[int, float]:
        late_s = dict.fromkeys(self.group, 0.0)
        for rank, seconds in zip(self.ranks, self.seconds, strict=True):
            late_s[rank] += seconds
        return late_s


def find_uneven_steps(study: StepStudy) -> None:
    """Charge the time that the latest rank of each step is behind the median."""
    if any(cause.kind == "straggler" for cause in study.causes) or len(study.table.ranks) < 2:
        return
    groups = study.group_comparable_ranks()
    if any(len(group) < 2 for group in groups):
        return
    lateness = max(
        (_measure_lateness(study, group) for group in groups), key=lambda each: each.total_s
    )
    share = lateness.total_s / study.total_s
    if share < MIN_SHARE:
        return
    behind = f"the latest rank of a step is {format_percent(share, 1)} of it behind the median"
    action = "look for other processes on these machines, and for batches of uneven length"
    few_steps = describe_few_steps(study.table, lateness.seconds)
    if few_steps:
        worst = max(range(study.table.num_steps), key=lateness.seconds.__getitem__)
        rank, step = lateness.ranks[worst], study.table.steps[worst]
        subject = "ranks that were late once or twice"
        evidence = [
            f"{behind}, in the mean",
            *few_steps,
            f"in step {step:,} rank {rank} was"
            f" {format_milliseconds(lateness.seconds[worst])} behind",
        ]
        action = f"see what happened then (phalanx logs RUN --since step:{step})"
    else:
        subject, delay = _describe_late_ranks(lateness)
        evidence = [f"{behind}{delay}"]
    study.causes.append(
        Cause(
            "uneven steps",
            share,
            calculate_speedup(study.table, study.total_s - lateness.total_s),
            subject,
            tuple(evidence),
            action,
            is_upper_bound=True,
        )
    )


def _measure_lateness(study: StepStudy, group: tuple[int, ...]) -> Lateness:
    ranks, late_s = [], []
    for index in range(study.table.num_steps):
        own_seconds = {rank: study.remaining_seconds(rank, index) for rank in group}
        latest = max(own_seconds, key=own_seconds.__getitem__)
        ranks.append(latest)
        late_s.append(own_seconds[latest] - median(own_seconds.values()))
    return Lateness(group, ranks, late_s)


def _describe_late_ranks(lateness: Lateness) -> tuple[str, str]:
    """Words for the ranks that are late most, if they are less than half of all; else for all."""
    late_s, few, few_s = lateness.sum_by_rank(), list[int](), 0.0
    ordered = sorted(late_s, key=late_s.__getitem__, reverse=True)
    while few_s < MIN_EXPLAINED_SHARE * lateness.total_s and ordered:
        few.append(ordered.pop(0))
        few_s += late_s[few[-1]]
    if 2 * len(few) > len(late_s) or len(few) > _MAX_NAMED_RANKS:
        return "ranks that are late in turn", ", and it is another one each time"
    names = ", ".join(map(str, sorted(few)))
    of_time = f"in {format_percent(few_s, lateness.total_s)} of that time"
    if len(few) == 1:
        return f"rank {names}, late at times", f"; it is rank {names} {of_time}"
    return f"ranks {names}, late in turn", f"; it is one of {names} {of_time}"
