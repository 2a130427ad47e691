"""The blocks of each stage: cut so that the slowest stage (of ranks with several, the busiest rank)
is as fast as it can be, or as the user says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.plan.pipeline.simulate import Seconds


@dataclass(frozen=True)
class LayerCosts:
    """The cost of each part of a model, in any one unit.

    The first stage has the embedding too, the last the head.
    """

    embedding: Seconds
    blocks: tuple[Seconds, ...]
    head: Seconds

    def sum_by_stage(self, stages: StageCut) -> tuple[Seconds, ...]:
        costs = [self.sum_blocks(first, end) for first, end in stages.block_ranges]
        costs[0] += self.embedding
        costs[-1] += self.head
        return tuple(costs)

    def sum_blocks(self, first: int, end: int) -> Seconds:
        """The cost of the blocks from `first` to before `end`."""
        return sum(self.blocks[first:end])


@dataclass(frozen=True)
class StageCut:
    """The number of blocks of each stage, from first to last."""

    num_blocks: tuple[int, ...]

    @cached_property
    def block_ranges(self) -> tuple[tuple[int, int], ...]:
        """(first block, one past the last) of each stage."""
        ends = tuple(accumulate(self.num_blocks))
        return tuple(zip((0, *ends[:-1]), ends, strict=True))

    def stage_of_block(self, block: int) -> int:
        return next(
            stage for stage, (first, end) in enumerate(self.block_ranges) if first <= block < end
        )

    def to_json(self) -> dict[str, Any]:
        return {"num_blocks": list(self.num_blocks)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> StageCut:
        return cls(tuple(body["num_blocks"]))


def cut_stages(costs: LayerCosts, num_stages: int) -> StageCut:
    """The cut whose costliest stage is cheapest; of several such, the most even one (least sum
    of squares).

    Stages are runs of neighbouring blocks, at least one each; only the first and the last may have
    none, if embedding or head alone is their work. Where that leaves a choice, earlier stages have
    fewer blocks, since they hold more microbatches. Raises LayoutError for more stages than there
    is work for.
    """
    num_blocks = len(costs.blocks)
    most = num_blocks + (costs.embedding > 0) + (costs.head > 0)
    if num_stages < 1 or num_stages > most:
        nearest = most
        if num_stages < 1:
            nearest = 1
        raise LayoutError(
            f"{num_blocks} blocks cannot be cut into {num_stages} stages", fix=f"nearest: {nearest}"
        )
    # Twice: among the cuts whose costliest stage is cheapest, the most even one.
    work = _IntegerCosts.from_costs(costs, num_stages)
    largest, _ = _find_optimal_cut(work, limit=None)
    _, num_blocks_of = _find_optimal_cut(work, limit=largest)
    return StageCut(num_blocks_of)


def build_requested_cut(num_blocks: Sequence[int], num_layers: int, num_stages: int) -> StageCut:
    """The stages as the user wants them.

    Raises LayoutError if they do not add up, naming the nearest that do.
    """
    listed = ", ".join(map(str, num_blocks))
    least = [int(stage not in (0, num_stages - 1)) for stage in range(num_stages)]
    if sum(least) > num_layers:
        raise LayoutError(
            f"{num_layers} blocks cannot be cut into {num_stages} stages",
            fix=f"nearest: {num_layers}",
        )
    if len(num_blocks) != num_stages:
        raise LayoutError(
            f"blocks are given for {len(num_blocks)} stages ({listed}), and there are {num_stages}",
            fix=f"give {num_stages} numbers, such as "
            f"{_suggest_nearest_cut(least, least, num_layers)}",
        )
    if empty := [stage for stage, count in enumerate(num_blocks) if count < least[stage]]:
        raise LayoutError(
            f"stage {empty[0]} of {listed} blocks would have {num_blocks[empty[0]]}",
            why="only the first and the last stage have work without a block: embedding and head",
            fix=f"such as {_suggest_nearest_cut(least, least, num_layers)}",
        )
    if sum(num_blocks) != num_layers:
        raise LayoutError(
            f"stages of {listed} blocks make {sum(num_blocks)}, and the model has {num_layers}",
            fix=f"nearest: {_suggest_nearest_cut(num_blocks, least, num_layers)}",
        )
    return StageCut(tuple(num_blocks))


def _suggest_nearest_cut(num_blocks: Sequence[int], least: Sequence[int], num_layers: int) -> str:
    """The nearest numbers of blocks that add up: what is missing goes to the smallest stages,
    what is too much is taken from the largest."""
    mended = list(num_blocks)
    # One block at a time, so that what is added or taken is spread evenly.
    while (missing := num_layers - sum(mended)) != 0:
        if missing > 0:
            mended[mended.index(min(mended))] += 1
        else:
            mended[_find_largest_shrinkable_stage(mended, least)] -= 1
    return ", ".join(map(str, mended))


def _find_largest_shrinkable_stage(num_blocks: Sequence[int], least: Sequence[int]) -> int:
    """The first of the largest stages that have more blocks than the least they may have."""
    spare = list(num_blocks)
    for stage, low in enumerate(least):
        if spare[stage] <= low:
            spare[stage] = -1
    return spare.index(max(spare))


@dataclass(frozen=True)
class _IntegerCosts:
    """Costs as whole numbers, so that equal stages are equal: sums of floats are not."""

    sums: tuple[int, ...]  # of the blocks before each
    embedding: int
    head: int
    num_stages: int

    @classmethod
    def from_costs(cls, costs: LayerCosts, num_stages: int) -> _IntegerCosts:
        # A float is a Fraction exactly, so scaling by the common denominator loses nothing.
        exact = [Fraction(cost) for cost in (costs.embedding, *costs.blocks, costs.head)]
        scale = math.lcm(*(cost.denominator for cost in exact))
        embedding, *blocks, head = (int(cost * scale) for cost in exact)
        return cls((0, *accumulate(blocks)), embedding, head, num_stages)

    @cached_property
    def num_blocks(self) -> int:
        return len(self.sums) - 1

    def cost_outside_blocks(self, stage: int) -> int:
        cost = 0
        if stage == 0:
            cost += self.embedding
        if stage == self.num_stages - 1:
            cost += self.head
        return cost

    def list_possible_firsts(self, stage: int) -> range:
        """The blocks at which a stage may begin: those before it have one each, but for the first
        if the embedding is work enough."""
        if stage == 0:
            return range(1)
        return range(stage - (self.embedding > 0), self.num_blocks + 1)

    def bound_possible_ends(self, stage: int) -> tuple[int, int, int]:
        """(least number of blocks, least end, most) of a stage that has work, as those after it."""
        after = self.num_stages - 1 - stage
        may_be_empty = (stage == 0 and self.embedding > 0) or (after == 0 and self.head > 0)
        if after == 0:
            return int(not may_be_empty), self.num_blocks, self.num_blocks
        # Each stage after this one needs a block, but for the last if the head is work enough.
        return int(not may_be_empty), 0, self.num_blocks - (after - (self.head > 0))


def _find_optimal_cut(work: _IntegerCosts, limit: int | None) -> tuple[int, tuple[int, ...]]:
    """Without a `limit` the least cost of the costliest stage; with one the least sum of the
    squares of stages that each cost at most so much. And the blocks of each stage that has it.

    Dynamic programming from the last stage to the first.
    """
    sums = work.sums
    # The value of the stages after one, by the block at which they begin; None where none can.
    after: list[int | None] = [None] * work.num_blocks + [0]
    ends_by_stage: list[dict[int, int]] = []
    for stage in reversed(range(work.num_stages)):
        best: list[int | None] = [None] * len(after)
        ends: dict[int, int] = {}
        extra = work.cost_outside_blocks(stage)
        least_blocks, least_end, most_end = work.bound_possible_ends(stage)
        for first in work.list_possible_firsts(stage):
            cost_before = sums[first] - extra
            least = max(first + least_blocks, least_end)
            if least > most_end:
                break  # nor has a stage that begins later an end
            lowest = None
            too_much: float = math.inf if limit is None else limit + 1
            for end in range(least, most_end + 1):
                cost = sums[end] - cost_before
                # A stage of more blocks costs no less, and a value is never below its cost.
                if cost >= too_much:
                    break
                # The stages after this one are at their best already: their order is backwards.
                value = after[end]
                if value is None:
                    continue
                if limit is not None:
                    value += cost * cost
                elif cost > value:
                    value = cost
                # Strictly less: of equal values the smallest `end` stays, and with it an
                # early stage of fewer blocks.
                if lowest is None or value < lowest:
                    lowest, ends[first] = value, end
                    if limit is None:
                        too_much = value
            best[first] = lowest
        after = best
        ends_by_stage.append(ends)
    least_value = after[0]
    assert least_value is not None, "the caller asks"
    num_blocks, first = [], 0
    for ends in reversed(ends_by_stage):
        num_blocks.append(ends[first] - first)
        first = ends[first]
    return least_value, tuple(num_blocks)


def cut_stages_for_ranks(costs: LayerCosts, rank_of_stage: Sequence[int]) -> StageCut:
    """The cut of `cut_stages`; where ranks have several stages, blocks move between stages as
    long as that lowers the work of the busiest rank, or at the same work that of the slowest
    stage, or makes stages more even.

    Each step is the best single move; what it ends with need not be the best of all cuts. Raises
    LayoutError for more stages than there is work for.
    """
    best = cut_stages(costs, len(rank_of_stage))
    # One stage on each rank: the slowest stage is the busiest rank, and the cut is the best one.
    if len(set(rank_of_stage)) == len(rank_of_stage):
        return best
    rater = _CutRater(costs, rank_of_stage)
    num_blocks: tuple[int, ...] | None = best.num_blocks
    rating = rater.rate(best.num_blocks)
    # Strictly lower each time, so the loop ends.
    while num_blocks is not None:
        best = StageCut(num_blocks)
        num_blocks, rating = rater.find_best_move(best.num_blocks, rating)
    return best


def _list_moves(costs: LayerCosts, num_blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(stage that gives a block, stage that takes one): blocks between them shift along."""
    least = [1] * len(num_blocks)
    if costs.embedding > 0:
        least[0] = 0
    if costs.head > 0:
        least[-1] = 0
    for giver, count in enumerate(num_blocks):
        if count <= least[giver]:
            continue
        for taker in range(len(num_blocks)):
            if taker != giver:
                yield giver, taker


_CutRating = tuple[float, float, float]
NUM_RATED_DIGITS = 9


class _CutRater:
    """Rates cuts, lower is better: by the work of the busiest rank, then that of the slowest
    stage, then unevenness.

    As shares of all work, rounded: sums of floats in another order are not equal, and nine digits
    mean the same for costs in seconds and in FLOPs.
    """

    def __init__(self, costs: LayerCosts, rank_of_stage: Sequence[int]) -> None:
        self.costs, self.rank_of_stage = costs, rank_of_stage
        self._stages_of_rank: dict[int, list[int]] = {}
        for stage, rank in enumerate(rank_of_stage):
            self._stages_of_rank.setdefault(rank, []).append(stage)
        # Thousands of cuts have the same few stages.
        self._cost_of_blocks = lru_cache(maxsize=None)(costs.sum_blocks)

    def rate(self, num_blocks: Sequence[int]) -> _CutRating:
        of_stages = self._sum_by_stage(num_blocks)
        total = _sum_work(of_stages)
        of_ranks: dict[int, Seconds] = {}
        for rank, cost in zip(self.rank_of_stage, of_stages, strict=True):
            of_ranks[rank] = of_ranks.get(rank, 0) + cost
        unevenness = sum(float(cost / total) ** 2 for cost in of_stages) * total
        parts = (max(of_ranks.values()), max(of_stages), unevenness)
        busiest, slowest, uneven = (round(float(part) / total, NUM_RATED_DIGITS) for part in parts)
        return busiest, slowest, uneven

    def find_best_move(
        self, num_blocks: tuple[int, ...], rating: _CutRating
    ) -> tuple[tuple[int, ...] | None, _CutRating]:
        """The first of the best cuts that are one move from `num_blocks`, with its rating; None if
        no rating is below `rating`."""
        best = None
        boundaries = (0, *accumulate(num_blocks))
        # A rank above it is busier than the busiest one may be, however sums are rounded.
        work_of_busiest = (rating[0] + 10.0**-NUM_RATED_DIGITS) * _sum_work(
            self._sum_by_stage(num_blocks)
        )
        for giver, taker in _list_moves(self.costs, num_blocks):
            if self._sum_work_of_taker(boundaries, giver, taker) > work_of_busiest:
                continue
            moved = list(num_blocks)
            moved[giver] -= 1
            moved[taker] += 1
            lower = self.rate(moved)
            if lower < rating:
                best, rating = tuple(moved), lower
        return best, rating

    def _sum_work_of_taker(self, boundaries: Sequence[int], giver: int, taker: int) -> Seconds:
        """The work of the rank of `taker` after a move. `boundaries`: the first block of each
        stage, and the end of the last, before it."""
        low, high, shift = giver, taker, -1
        if taker < giver:
            low, high, shift = taker, giver, 1
        work: Seconds = 0
        for stage in self._stages_of_rank[self.rank_of_stage[taker]]:
            first, end = boundaries[stage], boundaries[stage + 1]
            if low < stage <= high:
                first += shift
            if low <= stage < high:
                end += shift
            work += self._cost_of_blocks(first, end)
            if stage == 0:
                work += self.costs.embedding
            if stage == len(self.rank_of_stage) - 1:
                work += self.costs.head
        return work

    def _sum_by_stage(self, num_blocks: Sequence[int]) -> list[Seconds]:
        """`LayerCosts.sum_by_stage`."""
        first, costs = 0, []
        for count in num_blocks:
            costs.append(self._cost_of_blocks(first, first + count))
            first += count
        costs[0] += self.costs.embedding
        costs[-1] += self.costs.head
        return costs


def _sum_work(of_stages: Sequence[Seconds]) -> float:
    return float(sum(of_stages)) or 1.0
