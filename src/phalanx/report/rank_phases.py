"""How long the steps of each rank took, and what they spent it on."""

from __future__ import annotations

import math

from phalanx.report.bottleneck.step_table import StepTable
from phalanx.report.event_log import RankStepTimes
from phalanx.report.facts import RankPhaseSeconds
from phalanx.report.percentiles import compute_weighted_percentile


def sum_rank_phase_seconds(rank: int, clock: RankStepTimes) -> RankPhaseSeconds:
    ordered = sorted(zip(clock.step_s, clock.counts, strict=True))
    num_steps = clock.num_steps
    count = max(num_steps, 1)
    mean_s = math.nan
    if ordered:
        mean_s = sum(seconds * each for seconds, each in ordered) / count
    return RankPhaseSeconds(
        rank=rank,
        num_steps=num_steps,
        mean_groups_s={name: seconds / count for name, seconds in clock.groups_s.items()},
        mean_s=mean_s,
        p50_s=compute_weighted_percentile(ordered, 0.50),
        p99_s=compute_weighted_percentile(ordered, 0.99),
        max_s=compute_weighted_percentile(ordered, 1.00),
    )


def sum_newest_steps(table: StepTable | None) -> list[RankPhaseSeconds]:
    ranks = []
    if table is not None and table.num_steps:
        # A row may be the mean of a window of steps.
        count = max(round(table.steps_per_row), 1)
        for rank, rows in table.rows.items():
            clock = RankStepTimes()
            for row in rows:
                groups_s = {name: count * seconds for name, seconds in row.seconds.items()}
                clock.add_steps(count * row.step_s, count, groups_s)
            ranks.append(sum_rank_phase_seconds(rank, clock))
    return ranks
