"""Remedies for a large bubble (more microbatches, or more stages on each rank), and the warnings
that propose them.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from phalanx.core.errors import LayoutError
from phalanx.core.units import plural
from phalanx.job.nearest import list_divisors
from phalanx.job.schema import Job
from phalanx.plan.pipeline.costs import compute_model_part_costs
from phalanx.plan.pipeline.cut import LayerCosts, cut_stages_for_ranks
from phalanx.plan.pipeline.generate import generate_schedule, get_default_stages_per_rank
from phalanx.plan.pipeline.pipeline_plan import Pipeline, map_stages_to_ranks
from phalanx.plan.pipeline.simulate import Seconds, StageCosts, simulate_timeline
from phalanx.plan.pipeline.trace import (
    has_split_backward,
    scale_stage_costs,
    sum_forward_backward_s,
)
from phalanx.plan.plan import Plan

MAX_BUBBLE_WITHOUT_WARNING = 0.2  # of the ranks' time; waiting more than that is worth a change
MIN_UNEVEN_RATIO = 1.1  # the busiest rank against the mean of all
# Of a bubble: one that another schedule makes no smaller than this is left as it is.
MAX_WORTHWHILE_BUBBLE_RATIO = 0.95
# Of a bubble: what interleaving must bring, for it sends more messages.
MAX_INTERLEAVED_BUBBLE_RATIO = 0.9
MAX_SIMULATED_ACTIONS = 100_000  # of a schedule that is simulated here: planning must stay quick
MAX_SUGGESTED_MICROBATCHES = 32  # times as many as there are, at most, are proposed


def predict_bubble_of_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int,
    costs: Sequence[StageCosts],
) -> float | None:
    """Part of all ranks' time that is idle; None for a schedule that there is not, or one too
    long to look at."""
    # F, I and W of each microbatch in each stage, where backwards are split.
    if 3 * num_ranks * stages_per_rank * num_microbatches > MAX_SIMULATED_ACTIONS:
        return None
    try:
        schedule = generate_schedule(name, num_ranks, num_microbatches, stages_per_rank)
    except LayoutError:
        return None
    return float(simulate_timeline(schedule, costs).bubble)


def find_microbatches_for_small_bubble(
    pipeline: Pipeline, share: int, costs: Sequence[StageCosts] | None = None
) -> tuple[int, bool, float] | None:
    """(how many microbatches bring the bubble to the limit, whether the `share` of samples divides
    into them, bubble).

    `costs` of stages, where they are not the plan's: what was measured. Smaller microbatches before
    more samples. None for a schedule from a file, and where no number does.
    """
    if costs is None:
        costs = pipeline.costs
    if pipeline.rows or not costs:
        return None
    for count, is_divided in _list_larger_microbatch_counts(pipeline.num_microbatches, share):
        # A microbatch of fewer samples takes less time in all stages alike, which no share depends
        # on.
        bubble = predict_bubble_of_schedule(
            pipeline.schedule_name, pipeline.num_ranks, count, pipeline.stages_per_rank, costs
        )
        if bubble is not None and bubble <= MAX_BUBBLE_WITHOUT_WARNING:
            return count, is_divided, bubble
    return None


def _list_larger_microbatch_counts(now: int, share: int) -> Iterator[tuple[int, bool]]:
    """Larger numbers of microbatches to try, with True where they divide `share`: those first,
    because they leave the batch as it is."""
    for count in list_divisors(share):
        if now < count <= MAX_SUGGESTED_MICROBATCHES * now:
            yield count, True
    # Then larger batches, which change what a step learns from.
    for factor in range(2, MAX_SUGGESTED_MICROBATCHES + 1):
        yield factor * now, False


def predict_interleaved_bubble(pipeline: Pipeline, layers: LayerCosts) -> float | None:
    """The bubble with two stages on each rank; None if that cannot be, or a rank has more now."""
    if pipeline.schedule_name not in ("gpipe", "1f1b"):
        return None
    return predict_bubble_with_schedule(pipeline, layers, "interleaved")


def predict_bubble_with_schedule(pipeline: Pipeline, layers: LayerCosts, name: str) -> float | None:
    """The bubble of a named schedule in place of the pipeline's, `layers` cut anew; None if that
    cannot be."""
    per_rank = get_default_stages_per_rank(name)
    if len(layers.blocks) < per_rank * pipeline.num_ranks:
        return None
    placement = map_stages_to_ranks(name, pipeline.num_ranks, per_rank)
    stages = cut_stages_for_ranks(layers, placement)
    # F, I and W of a linear layer are one product each, so each takes as long as the others.
    costs = [StageCosts(cost, cost, cost) for cost in layers.sum_by_stage(stages)]
    return predict_bubble_of_schedule(
        name, pipeline.num_ranks, pipeline.num_microbatches, per_rank, costs
    )


def predict_bubble_with_halved_stages(
    pipeline: Pipeline, costs: Sequence[StageCosts]
) -> float | None:
    """The bubble with two stages on each rank, each half of one of now; None if that cannot be."""
    if pipeline.schedule_name not in ("gpipe", "1f1b") or min(pipeline.stages.num_blocks) < 2:
        return None
    halves = []
    for cost in costs:
        # Half of its cost each, as if embedding and head were divided, too.
        halves += [scale_stage_costs(cost, 0.5)] * 2
    return predict_bubble_of_schedule(
        "interleaved", pipeline.num_ranks, pipeline.num_microbatches, 2, halves
    )


def find_busiest_rank(work: Sequence[Seconds], rank_of_stage: Sequence[int]) -> tuple[int, float]:
    """The rank whose stages have most work, and how many times the mean of all ranks that is."""
    of_ranks: list[Seconds] = [0] * len(set(rank_of_stage))
    for rank, cost in zip(rank_of_stage, work, strict=True):
        of_ranks[rank] += cost
    rank = max(range(len(of_ranks)), key=of_ranks.__getitem__)
    mean = sum(of_ranks) / len(of_ranks)
    if not mean:
        return rank, 1.0
    return rank, float(of_ranks[rank] / mean)


def warn_of_large_bubble(job: Job, plan: Plan) -> str | None:
    """The warning for a bubble above a fifth, where ranks that wait become worth a change of the
    batch or of the schedule."""
    if plan.pipeline is None:
        return None
    timeline = plan.pipeline.timeline()
    if timeline is None or timeline.bubble <= MAX_BUBBLE_WITHOUT_WARNING:
        return None
    if plan.pipeline.rows:
        named = _suggest_named_schedule(plan.pipeline, _count_samples_per_pipeline(plan))
        remedy = f"write more microbatches into {job.parallel.schedule_file}{named}"
    else:
        remedy = _suggest_settings_for_smaller_bubble(
            job, plan, plan.pipeline, float(timeline.bubble)
        )
    work = [sum_forward_backward_s(cost) for cost in plan.pipeline.costs]
    rank, ratio = find_busiest_rank(work, plan.pipeline.rank_of_stage)
    if ratio > MIN_UNEVEN_RATIO:
        remedy += f"; rank {rank} has {ratio:.2f} times the mean work"
        if job.parallel.stage_blocks:
            remedy += ": leave parallel.stage_blocks out"
    return (
        f"ranks wait {float(timeline.bubble):.0%} of each step for other stages, with"
        f" {plural(plan.num_microbatches, 'microbatch', 'microbatches')} on"
        f" {plan.pipeline.num_ranks} ranks; {remedy}"
    )


def _count_samples_per_pipeline(plan: Plan) -> int:
    """The samples of a step that go through the pipeline of one data-parallel rank."""
    return plan.num_microbatches * plan.micro_batch_size


def _suggest_settings_for_smaller_bubble(
    job: Job, plan: Plan, pipeline: Pipeline, bubble: float
) -> str:
    """The settings that make `bubble` smaller, in words."""
    fixes = []
    share = _count_samples_per_pipeline(plan)
    enough = find_microbatches_for_small_bubble(pipeline, share)
    if enough is not None:
        count, is_divided, new_bubble = enough
        if is_divided:
            how = f"train.micro_batch_size={share // count}"
        else:
            batch = count * plan.micro_batch_size * plan.layout.data_parallel_size
            how = (
                f"train.global_batch_size={batch} with"
                f" train.micro_batch_size={plan.micro_batch_size}"
            )
        fixes.append(f"{how} ({count} microbatches: {new_bubble:.0%})")
    layers = compute_model_part_costs(job, plan.model_shape).layer_costs
    interleaved = predict_interleaved_bubble(pipeline, layers)
    if interleaved is not None and interleaved < MAX_INTERLEAVED_BUBBLE_RATIO * bubble:
        fixes.append(f"parallel.schedule=interleaved ({interleaved:.0%})")
    if not fixes:
        return "use fewer pipeline ranks (parallel.pp)"
    return f"set {' or '.join(fixes)}"


def _suggest_named_schedule(pipeline: Pipeline, share: int) -> str:
    """The microbatches that a named schedule needs which has the stages where the file has them,
    in brackets; "" if none has."""
    for name in ("1f1b", "interleaved"):
        placement = map_stages_to_ranks(name, pipeline.num_ranks, pipeline.stages_per_rank)
        if pipeline.rank_of_stage != placement:
            continue
        enough = find_microbatches_for_small_bubble(
            replace(pipeline, schedule_name=name, rows=()), share
        )
        if enough is not None:
            return f" ({name} with {enough[0]} would wait {enough[2]:.0%})"
    return ""


def warn_of_compiled_split_backward(job: Job, plan: Plan) -> str | None:
    """The warning for a schedule that puts off gradients of weights with compiled blocks, which
    do their backward at once."""
    if (
        plan.pipeline is None
        or not plan.compile
        or not has_split_backward(plan.pipeline.schedule())
    ):
        return None
    name, replaced = plan.pipeline.schedule_name, ""
    if plan.pipeline.rows:
        name = str(job.parallel.schedule_file)
        replaced = " in place of parallel.schedule_file"
    message = (
        f"schedule {name} puts off gradients of weights (W), and train.compile leaves nothing to"
        " put off: compiled blocks do both halves of a backward at once"
    )
    layers = compute_model_part_costs(job, plan.model_shape).layer_costs
    timeline = plan.pipeline.timeline()
    if timeline is None:
        return message
    now = float(timeline.bubble)
    bubbles = []
    for other in ("1f1b", "interleaved"):
        bubble = predict_bubble_with_schedule(plan.pipeline, layers, other)
        if bubble is not None:
            bubbles.append((bubble, other))
    message += f"; ranks wait {now:.0%} of each step"
    least, best = min(bubbles, default=(now, plan.pipeline.schedule_name))
    if least > MAX_WORTHWHILE_BUBBLE_RATIO * now:
        return f"{message}, and neither 1f1b nor interleaved has them wait less"
    return f"{message}; set parallel.schedule={best}{replaced} ({least:.0%})"
