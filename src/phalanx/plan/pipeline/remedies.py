"""What would make a bubble smaller: more microbatches, or more stages on each rank. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.core.errors import LayoutError
from phalanx.job.nearby import divisors
from phalanx.plan.pipeline.cut import LayerCosts
from phalanx.plan.pipeline.generate import default_stages_per_rank, generate
from phalanx.plan.pipeline.measured import times
from phalanx.plan.pipeline.order import Seconds
from phalanx.plan.pipeline.planned import Pipeline, placement_of
from phalanx.plan.pipeline.simulate import StageCosts, simulate
from phalanx.plan.pipeline.spread import cut_for_ranks

LIMIT = 0.2  # of the ranks' time; waiting more than that is worth a change
UNEVEN = 1.1  # the busiest rank against the mean of all
MAX_ACTIONS = 100_000  # of a schedule that is looked at here
MAX_MICROBATCHES = 32  # times as many as there are, at most, are proposed


def bubble_of(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int,
    costs: Sequence[StageCosts],
) -> float | None:
    """Part of all ranks' time that is idle; None for a schedule that there is not, or one too
    long to look at."""
    if 3 * num_ranks * stages_per_rank * num_microbatches > MAX_ACTIONS:
        return None
    try:
        schedule = generate(name, num_ranks, num_microbatches, stages_per_rank)
    except LayoutError:
        return None
    return float(simulate(schedule, costs).bubble)


def enough_microbatches(
    pipeline: Pipeline, share: int, costs: Sequence[StageCosts] | None = None
) -> tuple[int, bool, float] | None:
    """(how many microbatches bring the bubble to the limit, whether the `share` of samples divides
    into them, bubble).

    `costs` of stages, where they are not the plan's: what was measured. Smaller microbatches before
    more samples. None for a schedule from a file, and where no number does.
    """
    costs = pipeline.costs if costs is None else costs
    if pipeline.rows or not costs:
        return None
    for count, is_divided in _counts(pipeline.num_microbatches, share):
        # A microbatch of fewer samples takes less time in all stages alike, which no share depends
        # on.
        bubble = bubble_of(
            pipeline.schedule_name, pipeline.num_ranks, count, pipeline.stages_per_rank, costs
        )
        if bubble is not None and bubble <= LIMIT:
            return count, is_divided, bubble
    return None


def _counts(now: int, share: int) -> Iterator[tuple[int, bool]]:
    yield from ((count, True) for count in divisors(share) if now < count <= MAX_MICROBATCHES * now)
    yield from ((factor * now, False) for factor in range(2, MAX_MICROBATCHES + 1))


def interleaved_instead(pipeline: Pipeline, layers: LayerCosts) -> float | None:
    """The bubble with two stages on each rank; None where that cannot be, or a rank has more
    now."""
    return (
        instead(pipeline, layers, "interleaved")
        if pipeline.schedule_name in ("gpipe", "1f1b")
        else None
    )


def instead(pipeline: Pipeline, layers: LayerCosts, name: str) -> float | None:
    """The bubble of a named schedule in place of the pipeline's, `layers` cut anew; None where
    that cannot be."""
    per_rank = default_stages_per_rank(name)
    if len(layers.blocks) < per_rank * pipeline.num_ranks:
        return None
    placement = placement_of(name, pipeline.num_ranks, per_rank)
    costs = [
        StageCosts(cost, cost, cost) for cost in layers.of_stages(cut_for_ranks(layers, placement))
    ]
    return bubble_of(name, pipeline.num_ranks, pipeline.num_microbatches, per_rank, costs)


def halved(pipeline: Pipeline, costs: Sequence[StageCosts]) -> float | None:
    """The bubble with two stages on each rank, each half of one of now; None where that cannot
    be."""
    if pipeline.schedule_name not in ("gpipe", "1f1b") or min(pipeline.stages.num_blocks) < 2:
        return None
    halves = [times(cost, 0.5) for cost in costs for _ in range(2)]
    return bubble_of("interleaved", pipeline.num_ranks, pipeline.num_microbatches, 2, halves)


def busiest(work: Sequence[Seconds], rank_of_stage: Sequence[int]) -> tuple[int, float]:
    """The rank whose stages have most work, and how many times the mean of all ranks that is."""
    of_ranks: list[Seconds] = [0] * len(set(rank_of_stage))
    for rank, cost in zip(rank_of_stage, work, strict=True):
        of_ranks[rank] += cost
    rank = max(range(len(of_ranks)), key=of_ranks.__getitem__)
    mean = sum(of_ranks) / len(of_ranks)
    return rank, float(of_ranks[rank] / mean) if mean else 1.0
