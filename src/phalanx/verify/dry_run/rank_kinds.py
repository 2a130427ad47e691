"""The kinds of rank of a plan: ranks of one kind run the same program on tensors of the same forms.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.plan.plan import Plan


@dataclass(frozen=True)
class RankKind:
    """One kind, and the rank that stands for it. `stages`: of a pipeline, those that it holds."""

    name: str
    rank: int
    stages: tuple[int, ...] = ()


def choose_rank_kinds(plan: Plan, *, all_kinds: bool = False) -> list[RankKind]:
    """The kinds to run, the one with the first stage first.

    Of a pipeline these are the ranks with the first and the last stage and the one whose memory is
    predicted to peak; with `all_kinds` all of its ranks. Without a pipeline ranks differ in what
    they hold of tensors that do not divide: the first has most, and with `all_kinds` the last is
    run, too.
    """
    if plan.pipeline is None:
        kinds = [RankKind("every rank", 0)]
        if all_kinds and plan.world_size > 1:
            kinds = [RankKind("first rank", 0), RankKind("last rank", plan.world_size - 1)]
        return kinds
    pipeline, per_stage = plan.pipeline, plan.world_size // plan.layout.pp
    numbers: Sequence[int] = range(plan.layout.pp)
    if not all_kinds:
        totals = [sum(plan.memory_of_rank(number * per_stage).values()) for number in numbers]
        highest = max(numbers, key=lambda number: totals[number])
        numbers = sorted({0, pipeline.rank_of_stage[-1], highest})
    return [
        RankKind(
            f"pipeline rank {number}", number * per_stage, tuple(pipeline.stages_of_rank(number))
        )
        for number in numbers
    ]
