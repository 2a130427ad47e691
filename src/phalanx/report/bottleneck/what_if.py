"""The measured steps again, with one cause taken out.

Ranks go in step: a step ends when the slowest of them has done its own part and what they send is
there. So what a step gains is what the largest of the ranks' own seconds loses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from phalanx.report.bottleneck.step_table import RankStep, StepTable

MAX_SHARE = 0.99
"""Nothing that is measured takes more of a step, as something else remains."""

SecondsOfRank = Callable[[int, int], float]
"""(rank, index of a step) -> seconds that a rank has, or would have, in that step."""


def simulate_steps(table: StepTable, self_seconds: SecondsOfRank) -> float:
    """Seconds of all steps together if ranks had other seconds of their own; waiting and transfer
    stay what the step has beyond the slowest rank."""
    total_s = 0.0
    for index in range(table.num_steps):
        step_s = max(rows[index].step_s for rows in table.rows.values())
        now_s = max(rows[index].self_s for rows in table.rows.values())
        then_s = max(self_seconds(rank, index) for rank in table.rows)
        total_s += max(step_s - now_s + then_s, 0.0)
    return total_s


def calculate_speedup(table: StepTable, seconds: float) -> float:
    """The ratio by which the steps are faster if all of them take `seconds`; at least 1."""
    if not 0 < seconds < table.total_s:
        return 1.0
    return table.total_s / seconds


def calculate_speedup_without(share: float) -> float:
    """The ratio by which steps are faster without a share (0 to 1) of their seconds; at most 100,
    whatever a file says."""
    return 1.0 / (1.0 - min(max(share, 0.0), MAX_SHARE))


class EditedSeconds:
    """Own seconds of ranks, of which some are taken out one after the other."""

    def __init__(self, table: StepTable) -> None:
        self._table = table
        self._seconds = {rank: [row.self_s for row in rows] for rank, rows in table.rows.items()}

    def __call__(self, rank: int, index: int) -> float:
        return self._seconds[rank][index]

    def total_s(self) -> float:
        """Seconds of all steps together, as edited."""
        return simulate_steps(self._table, self)

    def without(self, seconds_of: Mapping[int, list[float]]) -> EditedSeconds:
        """A copy in which each rank has so many seconds less in each step."""
        edited = EditedSeconds(self._table)
        for rank, of_steps in self._seconds.items():
            removed_s = seconds_of.get(rank)
            edited._seconds[rank] = list(of_steps)
            if removed_s is not None:
                edited._seconds[rank] = [
                    max(own_s - removed_step_s, 0.0)
                    for own_s, removed_step_s in zip(of_steps, removed_s, strict=True)
                ]
        return edited


def select_phase_seconds(rows: tuple[RankStep, ...], groups: Sequence[str]) -> list[float]:
    """A rank's seconds of some time groups, step by step, never negative."""
    return [max(sum(row.seconds.get(group, 0.0) for group in groups), 0.0) for row in rows]


def calculate_excess(
    table: StepTable, rank: int, peers: tuple[int, ...], seconds: SecondsOfRank
) -> list[float]:
    """Step by step: how many `seconds` more `rank` has than the median of `peers`; negative where
    it has fewer."""
    excess = []
    for index in range(table.num_steps):
        of_peers = median(seconds(other, index) for other in peers)
        excess.append(seconds(rank, index) - of_peers)
    return excess
