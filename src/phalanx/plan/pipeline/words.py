"""Why a pipeline is as it is, a line each: stages, schedule and bubble, microbatches in flight,
bytes that travel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from phalanx.core.units import format_bytes, plural
from phalanx.job.schema import Job
from phalanx.job.shape import ModelShape
from phalanx.plan.memory import Workload, of_one_rank
from phalanx.plan.pipeline.held import in_flight
from phalanx.plan.pipeline.memory import sent_bytes
from phalanx.plan.pipeline.parts import parts_of
from phalanx.plan.pipeline.planned import Pipeline
from phalanx.plan.pipeline.remedies import busiest
from phalanx.plan.pipeline.stages import weighed

MAX_LISTED = 16
EVEN = 1.005  # times the mean


def pipeline_reasons(job: Job, shape: ModelShape, work: Workload, pipeline: Pipeline) -> list[str]:
    lines = [
        _of_stages(job, shape, work, pipeline),
        _of_the_schedule(job, work, pipeline),
        _in_flight(pipeline),
    ]
    if shape.is_known:
        of_rank = [
            sent_per_step(of_one_rank(shape, work.tp, work.rules), work, pipeline, r)
            for r in range(pipeline.num_ranks)
        ]
        lines.append(
            f"pp: a rank sends up to {format_bytes(max(of_rank))} to other stages in a step"
        )
    return [f"pp: {line}" if not line.startswith("pp: ") else line for line in lines]


def _of_stages(job: Job, shape: ModelShape, work: Workload, pipeline: Pipeline) -> str:
    layers = weighed(parts_of(job, shape).layer_costs, work.segments or ())
    rank, ratio = busiest(layers.of_stages(pipeline.stages), pipeline.rank_of_stage)
    counts = pipeline.stages.num_blocks
    line = f"stages of {listed(counts)} blocks"
    if len(set(counts)) == 1:
        line = f"{len(counts)} stages of {plural(counts[0], 'block')}"
    if job.parallel.stage_blocks:
        line += ", as the job says"
    else:
        line += (
            f", cut by {'FLOPs' if shape.is_known else 'parameters'} so that the busiest rank has"
            " least to do"
        )
    block = sum(layers.blocks) / len(layers.blocks)
    if layers.head and block:
        line += f" (the head is the work of {float(layers.head / block):.1f} blocks)"
    return f"{line}; " + (
        f"rank {rank} has {ratio:.2f} times the mean" if ratio > EVEN else "all have as much"
    )


def _of_the_schedule(job: Job, work: Workload, pipeline: Pipeline) -> str:
    timeline = pipeline.timeline()
    name, number = pipeline.schedule_name, work.num_microbatches
    what = f"schedule {name}" if not pipeline.rows else f"schedule {job.parallel.schedule_file}"
    if job.parallel.schedule is None and not pipeline.rows:
        what += ", the default,"
    line = f"{what} with {plural(number, 'microbatch', 'microbatches')} of {work.micro_batch_size}"
    if timeline is not None:
        line += (
            f": predicted bubble {float(timeline.bubble):.1%} (of a step, ranks wait for each"
            " other)"
        )
    return line


def _in_flight(pipeline: Pipeline) -> str:
    held = in_flight(pipeline.schedule()).per_rank
    where = "on each rank" if len(set(held)) == 1 else "by rank"
    noun = "microbatch" if max(held) == 1 else "microbatches"
    return f"{listed(held)} {noun} of a stage in flight {where}; {needs_most(pipeline, held)}"


def needs_most(pipeline: Pipeline, held: Sequence[int]) -> str:
    """'rank 0 (stage 0) needs most memory, with 4 microbatches in flight'."""
    totals = pipeline.rank_bytes
    if not totals:
        return "memory is not predicted"
    rank = max(range(len(totals)), key=totals.__getitem__)
    return f"{named(pipeline, rank)} needs most memory, with {held[rank]} in flight"


def named(pipeline: Pipeline, rank: int) -> str:
    """'rank 0 (stages 0 and 7)'."""
    stages = [str(stage) for stage in pipeline.stages_of(rank)]
    if len(stages) == 1:
        return f"rank {rank} (stage {stages[0]})"
    return f"rank {rank} (stages {', '.join(stages[:-1])} and {stages[-1]})"


def sent_per_step(here: ModelShape, work: Workload, pipeline: Pipeline, rank: int) -> int:
    """Bytes that pipeline rank `rank` sends: what its stages hand on, and gradients back.

    `here`: `of_one_rank`.
    """
    owners = pipeline.rank_of_stage
    neighbours = [stage + d for stage in pipeline.stages_of(rank) for d in (-1, 1)]
    others = sum(0 <= stage < len(owners) and owners[stage] != rank for stage in neighbours)
    return others * work.num_microbatches * sent_bytes(here, work)


def listed(counts: Sequence[int]) -> str:
    """'10' of equal ones, '3, 3, 3, 2', or of many '63 times 10, 9'."""
    if len(set(counts)) == 1:
        return str(counts[0])
    if len(counts) <= MAX_LISTED:
        return ", ".join(map(str, counts))
    runs = [(value, len(list(run))) for value, run in groupby(counts)]
    return ", ".join(f"{times} times {value}" if times > 1 else str(value) for value, times in runs)
