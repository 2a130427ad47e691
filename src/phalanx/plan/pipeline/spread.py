"""Cuts for ranks with several stages: what counts is first the work of a rank, then that of a
stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from phalanx.plan.pipeline.cut import LayerCosts, Stages, cut
from phalanx.plan.pipeline.order import Seconds

_Value = tuple[Seconds, Seconds, Seconds]


def cut_for_ranks(costs: LayerCosts, rank_of_stage: Sequence[int]) -> Stages:
    """`cut` into as many stages; where ranks have several, blocks move between stages as long as
    that lowers the work of the busiest rank, or at the same work that of the slowest stage, or
    makes stages more even.

    Each step is the best single move; what it ends with need not be the best of all cuts. Raises
    LayoutError for more stages than there is work for.
    """
    best = cut(costs, len(rank_of_stage))
    if len(set(rank_of_stage)) == len(rank_of_stage):
        return best
    value = _value(costs, best, rank_of_stage)
    while True:
        moved = min(
            _moves(costs, best),
            key=lambda stages: _value(costs, stages, rank_of_stage),
            default=best,
        )
        lower = _value(costs, moved, rank_of_stage)
        if lower >= value:
            return best
        best, value = moved, lower


def _moves(costs: LayerCosts, stages: Stages) -> Iterator[Stages]:
    """One block less here, one more there: those between shift along."""
    counts, last = stages.num_blocks, len(stages.num_blocks) - 1
    has_work = {0: costs.embedding > 0, last: costs.head > 0}  # without a block
    for giver, count in enumerate(counts):
        if count <= (0 if has_work.get(giver, False) else 1):
            continue
        for taker in range(len(counts)):
            if taker != giver:
                moved = list(counts)
                moved[giver] -= 1
                moved[taker] += 1
                yield replace(stages, num_blocks=tuple(moved))


def _value(costs: LayerCosts, stages: Stages, rank_of_stage: Sequence[int]) -> _Value:
    """Rounded: sums of floats in another order are not equal."""
    of_stages = costs.of_stages(stages)
    of_ranks: dict[int, Seconds] = {}
    for rank, cost in zip(rank_of_stage, of_stages, strict=True):
        of_ranks[rank] = of_ranks.get(rank, 0) + cost
    total = float(sum(of_stages)) or 1.0
    parts = (
        max(of_ranks.values()),
        max(of_stages),
        sum(float(cost / total) ** 2 for cost in of_stages) * total,
    )
    return tuple(round(float(part) / total, 9) for part in parts)  # type: ignore[return-value]
