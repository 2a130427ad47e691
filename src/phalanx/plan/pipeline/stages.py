"""The pipeline of a job: its stages cut, its schedule sized, its costs told. Torch-free."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.job.costs import ModelCosts
from phalanx.job.nearest import list_divisors
from phalanx.job.schema import Job
from phalanx.plan.choice import Choice
from phalanx.plan.pipeline.bubble import (
    MAX_BUBBLE_WITHOUT_WARNING,
    find_microbatches_for_small_bubble,
)
from phalanx.plan.pipeline.costs import compute_model_part_costs, predict_stage_costs
from phalanx.plan.pipeline.cut import (
    LayerCosts,
    StageCut,
    build_requested_cut,
    cut_stages_for_ranks,
)
from phalanx.plan.pipeline.generate import can_have_stages_per_rank
from phalanx.plan.pipeline.memory import predict_rank_activation_bytes
from phalanx.plan.pipeline.pipeline_plan import SCHEDULE_FROM_FILE, Pipeline, build_named_pipeline
from phalanx.plan.pipeline.requested_schedule import DEFAULT_SCHEDULE, RequestedSchedule
from phalanx.plan.recompute import fit_recompute_budget, list_job_segments, list_recompute_notes
from phalanx.plan.segments import Segment
from phalanx.plan.workload import Workload, shard_shape


def plan_pipeline(
    job: Job,
    shape: ModelCosts,
    requested: RequestedSchedule,
    work: Workload,
    num_ranks: int,
    reasons: list[str],
) -> tuple[Workload, Pipeline]:
    """`work` with the blocks that are recomputed, and its pipeline; adds what must be said of
    them to `reasons`.

    Raises LayoutError for a model that cannot be cut so often, or not as the job says, and for a
    budget of recompute that a rank cannot keep to.
    """
    if not shape.num_layers:
        raise LayoutError(
            f"{shape.kind} shows no repeated blocks, and parallel.pp cuts between blocks",
            fix=(
                "keep its blocks in one nn.ModuleList of one class, or name them: block_pattern ="
                ' "layers.*"'
            ),
        )
    parts = compute_model_part_costs(job, shape)
    has_budget = job.train.recompute == "budget"
    # What a budget recomputes follows from the cut, which is made without it, therefore.
    segments = () if has_budget else list_job_segments(job, shape)
    costs = add_recompute_costs(parts.layer_costs, segments)
    pipeline = _build_pipeline(
        job, requested, work, _cut_stages_of_job(job, shape, requested, costs, num_ranks)
    )
    if has_budget:
        segments = _fit_recompute_budget_by_rank(job, shape, work, pipeline)
    work = replace(work, segments=split_segments_at_stages(segments, pipeline.stages))
    recomputed, samples = list_fully_recomputed_blocks(segments), work.micro_batch_size
    seconds = predict_stage_costs(
        parts, pipeline.stages, samples=samples, recomputed=recomputed, tp=work.tp
    )
    # Compiled blocks do both halves of a backward at once: nothing is put off to a W.
    if job.train.compile:
        seconds = tuple(cost.without_split_backward for cost in seconds)
    shard = shard_shape(shape, work.tp, work.rules)
    size = max(predict_rank_activation_bytes(shard, work, pipeline))
    reasons += list_recompute_notes(job, shape, work.segments or (), size)
    return work, replace(pipeline, costs=seconds)


def plan_pipeline_and_microbatches(
    job: Job,
    shape: ModelCosts,
    requested: RequestedSchedule,
    work: Workload,
    num_ranks: int,
    reasons: list[str],
) -> tuple[Workload, Pipeline]:
    """The result of `plan_pipeline`; with more and smaller microbatches where the job leaves
    their size open, the stages as they were cut would wait too long, and that helps."""
    # Kept apart: what is said of the first cut is dropped where it is cut again.
    of_first: list[str] = []
    first_work, pipeline = plan_pipeline(job, shape, requested, work, num_ranks, of_first)
    # A job that says its microbatches needs no timeline, which takes long to simulate.
    timeline = pipeline.timeline() if job.train.micro_batch_size is None else None
    if timeline is not None and timeline.bubble > MAX_BUBBLE_WITHOUT_WARNING:
        share = work.micro_batch_size * work.num_microbatches
        enough = find_microbatches_for_small_bubble(pipeline, share)
        if enough is not None and enough[1]:
            count = enough[0]
            more = replace(work, micro_batch_size=share // count, num_microbatches=count)
            return plan_pipeline(job, shape, requested, more, num_ranks, reasons)
    reasons += of_first
    return first_work, pipeline


def list_pipeline_choices(
    job: Job, shape: ModelCosts, pipeline: Pipeline | None
) -> dict[str, Choice[Any]]:
    """The choices of keys of [parallel] that a pipeline comes with, by key; none without one."""
    if pipeline is None:
        return {}
    unit = "FLOPs"
    if shape.flops(job.data.seq_len) is None:
        unit = "parameters"
    blocks = Choice(
        tuple(pipeline.stages.num_blocks),
        f"cut by {unit} so that the busiest rank has least to do",
    )
    if pipeline.schedule_name == SCHEDULE_FROM_FILE:
        of_file = "as parallel.schedule_file says"
        return {
            "stage_blocks": blocks,
            "schedule": Choice("", of_file),
            "stages_per_rank": Choice(pipeline.stages_per_rank, of_file),
        }
    return {
        "stage_blocks": blocks,
        "schedule": Choice(pipeline.schedule_name, "the default of a pipeline"),
        "stages_per_rank": Choice(
            pipeline.stages_per_rank, f"what {pipeline.schedule_name} has unless told"
        ),
    }


def _build_pipeline(
    job: Job, requested: RequestedSchedule, work: Workload, stages: StageCut
) -> Pipeline:
    extra_modules: dict[str, Any] = {
        "first_stage": job.parallel.first_stage,
        "last_stage": job.parallel.last_stage,
    }
    if requested.written is None:
        return build_named_pipeline(
            requested.name, requested.num_ranks, work.num_microbatches, stages, **extra_modules
        )
    rows = tuple(",".join(map(str, row)) for row in requested.written.actions)
    placement = requested.written.rank_of_stage
    return Pipeline(
        SCHEDULE_FROM_FILE,
        requested.num_ranks,
        work.num_microbatches,
        stages,
        placement,
        rows=rows,
        **extra_modules,
    )


def _fit_recompute_budget_by_rank(
    job: Job, shape: ModelCosts, work: Workload, pipeline: Pipeline
) -> tuple[Segment, ...]:
    """The segments with which each rank recomputes as few of its blocks as it must."""
    shard = shard_shape(shape, work.tp, work.rules)
    segments_of_all: list[Segment] = []
    for rank in range(pipeline.num_ranks):
        ranges = [pipeline.stages.block_ranges[stage] for stage in pipeline.stages_of_rank(rank)]
        blocks = [block for first, end in ranges for block in range(first, end)]

        # A default binds this rank: a closure would see the loop's variable as it is when called.
        def activations(segments: tuple[Segment, ...], rank: int = rank) -> float:
            return predict_rank_activation_bytes(shard, replace(work, segments=segments), pipeline)[
                rank
            ]

        segments_of_all += fit_recompute_budget(job, shape, work, blocks, activations)
    return tuple(sorted(segments_of_all, key=lambda segment: segment.start))


def list_fully_recomputed_blocks(segments: Collection[Segment]) -> frozenset[int]:
    """The blocks that are recomputed in full, matrix products and all."""
    blocks: set[int] = set()
    for segment in segments:
        if segment.mode == "full":
            blocks |= set(range(segment.start, segment.stop))
    return frozenset(blocks)


def split_segments_at_stages(
    segments: Collection[Segment], stages: StageCut
) -> tuple[Segment, ...]:
    """`segments`, split so that they end where a stage does."""
    # Each once: a first or last stage without blocks begins where the next one does.
    starts = sorted({first for first, _ in stages.block_ranges})
    parts = []
    for segment in segments:
        inner = [start for start in starts if segment.start < start < segment.stop]
        for start, stop in pairwise([segment.start, *inner, segment.stop]):
            parts.append(replace(segment, start=start, stop=stop))
    return tuple(parts)


def add_recompute_costs(costs: LayerCosts, segments: Collection[Segment]) -> LayerCosts:
    """`costs` with recomputation."""
    blocks = list(costs.blocks)
    for block in list_fully_recomputed_blocks(segments):
        # A forward is a third of a block's cost, and done again it is a third more.
        blocks[block] = blocks[block] * 4 / 3
    return replace(costs, blocks=tuple(blocks))


# A search plans the same stages with one ZeRO stage and batch after the other.
_cut_once = lru_cache(maxsize=64)(cut_stages_for_ranks)


def _cut_stages_of_job(
    job: Job, shape: ModelCosts, requested: RequestedSchedule, costs: LayerCosts, num_ranks: int
) -> StageCut:
    num_blocks, num_stages = shape.num_layers, requested.num_stages
    if job.parallel.stage_blocks:
        return build_requested_cut(job.parallel.stage_blocks, num_blocks, num_stages)
    most = num_blocks + (costs.embedding > 0) + (costs.head > 0)
    if num_stages > most:
        per_rank = num_stages // requested.num_ranks
        over = f"parallel.pp {requested.num_ranks}" + (
            f" x {per_rank} stages per rank" if per_rank > 1 else ""
        )
        raise LayoutError(
            f"{num_blocks} blocks cannot be cut into the {num_stages} stages of {over}",
            fix=_suggest_fewer_stages(job, requested, most, num_ranks)
            or "leave parallel.pp out, or use a deeper model",
        )
    return _cut_once(costs, tuple(requested.rank_of_stage))


def _suggest_fewer_stages(job: Job, requested: RequestedSchedule, most: int, num_ranks: int) -> str:
    """The fix of a job that asks for more than `most` stages: fewer on each rank, fewer ranks,
    or one on each rank."""
    if requested.written is not None:
        return ""
    per_rank, pp = requested.num_stages // requested.num_ranks, requested.num_ranks
    of_job = job.parallel.degrees
    degrees = list_divisors(num_ranks // (of_job.tp * of_job.cp))
    if job.parallel.ranks is None:  # as many as the degrees make
        degrees = list(range(1, pp))
    fewer = [
        d
        for d in range(1, per_rank)
        if d * pp <= most and can_have_stages_per_rank(requested.name, d)
    ]
    narrower = [d for d in degrees if 1 < d < pp and d * per_rank <= most]
    fixes = [f"parallel.stages_per_rank={fewer[-1]}"] if fewer else []
    fixes += [f"parallel.pp={narrower[-1]}"] if narrower else []
    if per_rank > 1 and not fewer and pp <= most:
        fixes.append(
            f"parallel.schedule={DEFAULT_SCHEDULE}"
            + " without stages_per_rank" * bool(job.parallel.stages_per_rank)
        )
    if fixes:
        return f"nearest: {', or '.join(fixes)}"
    return ""
