"""A plan in words: the lines that a terminal and a log show of it, and why its pipeline is as it
is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from phalanx.core.units import format_bytes, format_count, plural
from phalanx.job.costs import ModelCosts
from phalanx.job.schema import Job
from phalanx.plan.choice import REASON_JOB_SAYS
from phalanx.plan.communication import pp_sent_bytes_per_step
from phalanx.plan.pipeline.bubble import find_busiest_rank
from phalanx.plan.pipeline.costs import compute_model_part_costs
from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.pipeline.simulate import count_peak_in_flight
from phalanx.plan.pipeline.stages import add_recompute_costs
from phalanx.plan.plan import Plan
from phalanx.plan.workload import Workload, shard_shape

MAX_LISTED_STAGES = 16
MAX_EVEN_RATIO = 1.005  # times the mean: below, two digits show no difference


def describe_plan(plan: Plan, *, of_samples: bool = False) -> list[str]:
    """The plan in a few lines of text for a terminal or a log.

    `of_samples`: of the user's own data, no sequences.
    """
    chosen, shape = plan.chosen, plan.model_shape
    samples = "samples"
    if plan.seq_len > 1:
        samples = shape.get_sample_noun(of_own_data=of_samples)
    if samples != "samples":
        samples += f" x {plan.seq_len} tokens"
    active = flops = ""
    if shape.experts is not None:
        active = f", {format_count(shape.num_active_params)} of them active"
    if plan.flops_per_token:
        flops = f" ({format_count(plan.flops_per_token)}FLOP per token)"
    lines = [
        (
            f"plan    {format_count(plan.num_params)} parameters{active}{flops}, {plan.precision}"
            f" on {plan.world_size} {plan.device} rank{'s' if plan.world_size > 1 else ''}:"
            f" {chosen.name} ({plan.layout})"
        ),
        (
            f"        {plan.global_batch_size} {samples} per step ="
            f" {plan.layout.data_parallel_size} "
            f"{_describe_model_axes(plan)}ranks x {plan.num_microbatches} x {plan.micro_batch_size}"
        ),
    ]
    lines += [f"why     {reason}" for reason in plan.reasons]
    lines += [f"warn    {warning.text}" for warning in plan.warnings]
    parts = ", ".join(
        f"{name} {format_bytes(size)}" for name, size in chosen.predicted_bytes.items() if size
    )
    where = "per rank predicted"
    if plan.pipeline is not None:
        where = "predicted on the rank that needs most"
    lines.append(f"memory  {format_bytes(chosen.total_bytes)} {where}: {parts}")
    if plan.pipeline is not None:
        totals = [format_bytes(total) for total in plan.pipeline.predicted_rank_bytes]
        shown = f"{totals[0]} to {totals[-1]}"
        if len(totals) <= MAX_LISTED_STAGES:
            shown = ", ".join(totals)
        lines.append(f"        by pipeline rank: {shown}")
    for candidate in plan.alternatives:
        if not candidate.chosen:
            lines.append(
                f"not     {candidate.name} ({format_bytes(candidate.total_bytes)}): {candidate.why}"
            )
    return lines


def _describe_model_axes(plan: Plan) -> str:
    """The axes besides data parallelism that share a part of the batch: "x pp 4 x tp 2 "."""
    degrees = plan.parallel.degrees.degrees_above_one("pp", "cp", "tp")
    return "".join(f"x {axis} {degree} " for axis, degree in degrees.items())


def explain_pipeline(
    job: Job,
    shape: ModelCosts,
    work: Workload,
    pipeline: Pipeline,
    reasons: Mapping[str, str],
) -> list[str]:
    """Lines on why a pipeline is as it is: stages, schedule and bubble, microbatches in flight,
    bytes sent. `reasons`: why keys of [parallel] have their values."""
    lines = [
        f"pp: {_explain_stages(job, shape, work, pipeline, reasons['stage_blocks'])}",
        f"pp: {_explain_schedule(job, work, pipeline, reasons['schedule'])}",
        f"pp: {_explain_in_flight(pipeline)}",
    ]
    if shape.activations is not None:
        shard, ranks = shard_shape(shape, work.tp, work.rules), range(pipeline.num_ranks)
        sent = max(pp_sent_bytes_per_step(shard, work, pipeline, rank) for rank in ranks)
        lines.append(f"pp: a rank sends up to {format_bytes(sent)} to other stages in a step")
    return lines


def _explain_stages(
    job: Job, shape: ModelCosts, work: Workload, pipeline: Pipeline, why: str
) -> str:
    layer_costs = compute_model_part_costs(job, shape).layer_costs
    layers = add_recompute_costs(layer_costs, work.segments or ())
    rank, ratio = find_busiest_rank(layers.sum_by_stage(pipeline.stages), pipeline.rank_of_stage)
    counts = pipeline.stages.num_blocks
    line = f"stages of {format_counts(counts)} blocks"
    if len(set(counts)) == 1:
        line = f"{len(counts)} stages of {plural(counts[0], 'block')}"
    line += f", {why}"
    block = sum(layers.blocks) / len(layers.blocks)
    if layers.head and block:
        line += f" (the head is the work of {float(layers.head / block):.1f} blocks)"
    if ratio > MAX_EVEN_RATIO:
        return f"{line}; rank {rank} has {ratio:.2f} times the mean"
    return f"{line}; all have as much"


def _explain_schedule(job: Job, work: Workload, pipeline: Pipeline, why: str) -> str:
    timeline = pipeline.timeline()
    name, number = pipeline.schedule_name, work.num_microbatches
    schedule = f"schedule {name}"
    if pipeline.rows:
        schedule = f"schedule {job.parallel.schedule_file}"
    elif why != REASON_JOB_SAYS:
        schedule += f", {why},"
    line = (
        f"{schedule} with {plural(number, 'microbatch', 'microbatches')} of {work.micro_batch_size}"
    )
    if timeline is not None:
        line += (
            f": predicted bubble {float(timeline.bubble):.1%} (of a step, ranks wait for each"
            " other)"
        )
    return line


def _explain_in_flight(pipeline: Pipeline) -> str:
    in_flight_by_rank = count_peak_in_flight(pipeline.schedule()).per_rank
    where = "by rank"
    if len(set(in_flight_by_rank)) == 1:
        where = "on each rank"
    noun = "microbatches"
    if max(in_flight_by_rank) == 1:
        noun = "microbatch"
    peak = describe_peak_rank(pipeline, in_flight_by_rank)
    return f"{format_counts(in_flight_by_rank)} {noun} of a stage in flight {where}; {peak}"


def describe_peak_rank(pipeline: Pipeline, in_flight_by_rank: Sequence[int]) -> str:
    """The rank that needs most memory, in words: 'rank 0 (stage 0) needs most memory, with 4 in
    flight'."""
    totals = pipeline.predicted_rank_bytes
    if not totals:
        return "memory is not predicted"
    rank = max(range(len(totals)), key=totals.__getitem__)
    return (
        f"{format_rank_and_stages(pipeline, rank)} needs most memory, with"
        f" {in_flight_by_rank[rank]} in flight"
    )


def format_rank_and_stages(pipeline: Pipeline, rank: int) -> str:
    """A rank and its stages in words: 'rank 0 (stages 0 and 7)'."""
    stages = [str(stage) for stage in pipeline.stages_of_rank(rank)]
    if len(stages) == 1:
        return f"rank {rank} (stage {stages[0]})"
    return f"rank {rank} (stages {', '.join(stages[:-1])} and {stages[-1]})"


def format_counts(counts: Sequence[int]) -> str:
    """Counts in words: '10' for equal ones, '3, 3, 3, 2', or for many '63 times 10, 9'."""
    if len(set(counts)) == 1:
        return str(counts[0])
    if len(counts) <= MAX_LISTED_STAGES:
        return ", ".join(map(str, counts))
    parts = []
    for value, run in groupby(counts):
        times = len(list(run))
        if times > 1:
            parts.append(f"{times} times {value}")
        else:
            parts.append(str(value))
    return ", ".join(parts)
