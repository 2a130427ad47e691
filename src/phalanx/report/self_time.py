"""The own time of each rank in each step beside that of its peers: where ranks are slow by
themselves, with waiting for others removed."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from phalanx.report.sample import split_into_buckets

if TYPE_CHECKING:
    # At run time in a circle: the table's groups of phases stand beside the facts.
    from phalanx.report.bottleneck.step_table import StepTable

MAX_MAP_ROWS = 48
MAX_MAP_COLUMNS = 120
NUM_SLOWEST_RANKS = 12


@dataclass(frozen=True)
class SlowRank:
    """A rank's own seconds in a step, in the mean; `excess_s` beyond the median of its peers, and
    most in `worst_step`."""

    rank: int
    self_s: float
    excess_s: float
    worst_step: int
    worst_excess_s: float


@dataclass(frozen=True)
class SelfTimeMap:
    """Seconds that ranks take by themselves beyond the median of their peers.

    `rows[i]` is of `ranks[i]`, several neighbours where there are many ranks: the largest of
    them. `steps[j]` are the first and the last step of column j, whose values are means.
    `slowest`: ranks by excess, largest first. `mean_excess_s` by rank. `attempt` is that of all
    steps, `step_s` the median length of a step. `steps_per_value`: where ranks record sums, each
    value is the mean of so many steps, up to the one that is named.
    """

    attempt: int
    ranks: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[int, int], ...]
    rows: tuple[tuple[float, ...], ...]
    slowest: tuple[SlowRank, ...]
    mean_excess_s: dict[int, float]
    step_s: float
    steps_per_value: float = 1.0
    has_stages_of_one_rank: bool = False
    """True where each rank is a pipeline stage of its own: no two of them have the same work."""
    is_of_last_attempt: bool = True
    """False where later attempts have too few steps."""

    @property
    def first_step(self) -> int:
        """The first step that the map has something of."""
        return max(self.steps[0][0] - round(self.steps_per_value) + 1, 1)


def build_self_time_map(
    table: StepTable | None, num_stages: int, num_ranks: int = 0
) -> SelfTimeMap | None:
    """The map of a table of steps; peers are the ranks of one of `num_stages` pipeline stages, or
    all of them where each is a stage of its own. `num_ranks`: of the run, of which files may be
    missing (0: those of the table).

    None without steps, or of one rank alone.
    """
    if table is None or not table.num_steps or len(table.ranks) < 2:
        return None
    peers = split_into_peers(table.ranks, num_stages, num_ranks)
    has_stages_of_one_rank = all(len(ranks) == 1 for ranks in peers)
    if has_stages_of_one_rank:
        peers = [table.ranks]
    excess = _compute_excess(table, peers)
    means = {rank: sum(values) / len(values) for rank, values in excess.items()}
    columns = split_into_buckets(table.num_steps, MAX_MAP_COLUMNS)
    by_rank = {
        rank: [sum(values[start:end]) / (end - start) for start, end in columns]
        for rank, values in excess.items()
    }
    ranks = table.ranks
    buckets = [ranks[start:end] for start, end in split_into_buckets(len(ranks), MAX_MAP_ROWS)]
    rows = []
    for bucket in buckets:
        of_bucket = [by_rank[rank] for rank in bucket]
        rows.append(tuple(max(column) for column in zip(*of_bucket, strict=True)))
    steps = [(table.steps[start], table.steps[end - 1]) for start, end in columns]
    lead = table.rows[ranks[0]]
    return SelfTimeMap(
        attempt=table.attempt,
        is_of_last_attempt=table.is_of_last_attempt,
        ranks=tuple(buckets),
        steps=tuple(steps),
        rows=tuple(rows),
        slowest=_list_slowest_ranks(table, excess, means),
        mean_excess_s=means,
        step_s=median(row.step_s for row in lead),
        steps_per_value=table.steps_per_row,
        has_stages_of_one_rank=has_stages_of_one_rank,
    )


def _compute_excess(table: StepTable, groups: Sequence[tuple[int, ...]]) -> dict[int, list[float]]:
    """By rank, for each step: its own seconds beyond the median of the others of its group, as the
    verdict counts them; of a rank without others 0."""
    excess: dict[int, list[float]] = {}
    for peers in groups:
        self_s = {rank: [row.self_s for row in table.rows[rank]] for rank in peers}
        columns = [_subtract_median_of_others(each) for each in zip(*self_s.values(), strict=True)]
        for index, rank in enumerate(peers):
            excess[rank] = [column[index] for column in columns]
    return {rank: excess[rank] for rank in table.ranks}


def _subtract_median_of_others(values: Sequence[float]) -> list[float]:
    """Each value less the median of the others; 0 of one alone."""
    ascending, num_others = sorted(values), len(values) - 1
    if not num_others:
        return [0.0]
    low, high = (num_others - 1) // 2, num_others // 2
    differences = []
    for value in values:
        # The places of the others move down by one from the value's own place on.
        own_index = bisect.bisect_left(ascending, value)
        usual = (ascending[low + (low >= own_index)] + ascending[high + (high >= own_index)]) / 2
        differences.append(value - usual)
    return differences


def split_into_peers(
    ranks: tuple[int, ...], num_stages: int, num_ranks: int = 0
) -> list[tuple[int, ...]]:
    """Those of `ranks` that have the same work, by pipeline stage. The outermost axis is that of
    the pipeline, so a stage has a run of the `num_ranks` numbers (0: `ranks` are all)."""
    num_ranks = max(num_ranks, ranks[-1] + 1)
    if num_stages <= 1 or num_ranks % num_stages:
        return [ranks]
    by_stage: dict[int, list[int]] = {}
    for rank in ranks:
        by_stage.setdefault(rank * num_stages // num_ranks, []).append(rank)
    return [tuple(of_stage) for of_stage in by_stage.values()]


def _list_slowest_ranks(
    table: StepTable, excess: dict[int, list[float]], means: dict[int, float]
) -> tuple[SlowRank, ...]:
    slowest = []
    for rank in sorted(means, key=lambda rank: (-means[rank], rank))[:NUM_SLOWEST_RANKS]:
        values, rows = excess[rank], table.rows[rank]
        worst = max(range(len(values)), key=values.__getitem__)
        self_s = sum(row.self_s for row in rows) / len(rows)
        slowest.append(SlowRank(rank, self_s, means[rank], table.steps[worst], values[worst]))
    return tuple(slowest)
