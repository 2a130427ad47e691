"""The pipeline of a job: its stages cut, its schedule sized, its costs told. Torch-free."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

from phalanx.core.errors import LayoutError
from phalanx.job.nearby import divisors
from phalanx.job.schema import Job
from phalanx.job.shape import ModelShape
from phalanx.plan.memory import Workload
from phalanx.plan.pipeline.asked import Asked
from phalanx.plan.pipeline.cut import LayerCosts, Stages, check_cut, cut
from phalanx.plan.pipeline.parts import costs_of, parts_of
from phalanx.plan.pipeline.planned import FROM_FILE, Pipeline, named_pipeline
from phalanx.plan.segments import Segment


def pipeline_of(job: Job, shape: ModelShape, asked: Asked, work: Workload, num_ranks: int) -> Pipeline:
    """Raises LayoutError for a model that cannot be cut so often, or not as the job says."""
    parts = parts_of(job, shape)
    recomputed = recomputed_blocks(work.segments or ())
    stages = _stages(job, shape, asked, _with_recompute(parts.layer_costs, recomputed), num_ranks)
    costs = costs_of(parts, stages, samples=work.micro_batch_size, recomputed=recomputed, tp=work.tp)
    held = {"first_stage": job.parallel.first_stage, "last_stage": job.parallel.last_stage}
    if asked.written is None:
        return named_pipeline(asked.name, asked.num_ranks, work.num_microbatches, stages, costs=costs, **held)
    rows = tuple(",".join(map(str, row)) for row in asked.written.actions)
    placement = asked.written.rank_of_stage
    return Pipeline(
        FROM_FILE, asked.num_ranks, work.num_microbatches, stages, placement, rows=rows, costs=costs, **held
    )


def recomputed_blocks(segments: Collection[Segment]) -> frozenset[int]:
    """Blocks whose matrix products are done again."""
    return frozenset(block for s in segments if s.mode == "full" for block in range(s.start, s.stop))


def within_stages(segments: Collection[Segment], stages: Stages) -> tuple[Segment, ...]:
    """Segments that end where a stage does."""
    starts = [begin for begin, _ in stages.ranges]
    found = []
    for segment in segments:
        inner = [start for start in dict.fromkeys(starts) if segment.start < start < segment.stop]
        borders = [segment.start, *inner, segment.stop]
        found += [replace(segment, start=a, stop=b) for a, b in pairwise(borders)]
    return tuple(found)


def _with_recompute(costs: LayerCosts, recomputed: Collection[int]) -> LayerCosts:
    """A forward is a third of a block's cost, and done again it is a third more."""
    blocks = tuple(cost * 4 / 3 if block in recomputed else cost for block, cost in enumerate(costs.blocks))
    return replace(costs, blocks=blocks) if recomputed else costs


def _stages(job: Job, shape: ModelShape, asked: Asked, costs: LayerCosts, num_ranks: int) -> Stages:
    num_blocks, num_stages = shape.num_layers, asked.num_stages
    if shape.measured is not None and not num_blocks:
        raise LayoutError(
            f"{shape.kind} shows no repeated blocks, and parallel.pp cuts between blocks",
            fix='keep its blocks in one nn.ModuleList of one class, or name them: block_pattern = "layers.*"',
        )
    if job.parallel.stage_blocks:
        return check_cut(job.parallel.stage_blocks, num_blocks, num_stages)
    most = num_blocks + (costs.embedding > 0) + (costs.head > 0)
    if num_stages > most:
        per_rank = num_stages // asked.num_ranks
        fitting = [d for d in divisors(num_ranks // (job.parallel.tp or 1)) if d > 1 and d * per_rank <= most]
        over = f"parallel.pp {asked.num_ranks}" + (f" x {per_rank} stages per rank" if per_rank > 1 else "")
        raise LayoutError(
            f"{num_blocks} blocks cannot be cut into the {num_stages} stages of {over}",
            fix=f"nearest: parallel.pp={fitting[-1]}" if fitting else "leave parallel.pp out, or use a deeper model",
        )
    return cut(costs, num_stages)
