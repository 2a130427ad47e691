"""What a job will probably regret of its pipeline, with what would be better. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.core.units import plural
from phalanx.job.schema import Job
from phalanx.plan.pipeline.measured import splits_backward, total_s
from phalanx.plan.pipeline.parts import parts_of
from phalanx.plan.pipeline.planned import Pipeline, placement_of
from phalanx.plan.pipeline.remedies import (
    LIMIT,
    UNEVEN,
    busiest,
    enough_microbatches,
    instead,
    interleaved_instead,
)

if TYPE_CHECKING:
    from phalanx.plan.plan import Plan

WORTH = 0.95  # of a bubble: one that another schedule makes no smaller than this is left as it is


def long_bubble(job: Job, plan: Plan) -> str | None:
    """A fifth is where ranks that wait become worth a change of the batch or of the schedule."""
    timeline = plan.pipeline.timeline() if plan.pipeline is not None else None
    if plan.pipeline is None or timeline is None or timeline.bubble <= LIMIT:
        return None
    share = plan.num_microbatches * plan.micro_batch_size
    fixes = []
    if (enough := enough_microbatches(plan.pipeline, share)) is not None:
        count, is_divided, bubble = enough
        how = f"train.micro_batch_size={share // count}"
        if not is_divided:
            batch = count * plan.micro_batch_size * plan.layout.data_parallel_size
            how = (
                f"train.global_batch_size={batch} with"
                f" train.micro_batch_size={plan.micro_batch_size}"
            )
        fixes.append(f"{how} ({count} microbatches: {bubble:.0%})")
    interleaved = interleaved_instead(plan.pipeline, parts_of(job, plan.model_shape).layer_costs)
    if interleaved is not None and interleaved < 0.9 * timeline.bubble:
        fixes.append(f"parallel.schedule=interleaved ({interleaved:.0%})")
    remedy = f"set {' or '.join(fixes)}" if fixes else "use fewer pipeline ranks (parallel.pp)"
    if plan.pipeline.rows:
        remedy = (
            "write more microbatches into"
            f" {job.parallel.schedule_file}{_as_named(plan.pipeline, share)}"
        )
    rank, ratio = busiest(
        [total_s(cost) for cost in plan.pipeline.costs], plan.pipeline.rank_of_stage
    )
    if ratio > UNEVEN:
        remedy += f"; rank {rank} has {ratio:.2f} times the mean work"
        remedy += ": leave parallel.stage_blocks out" if job.parallel.stage_blocks else ""
    return (
        f"ranks wait {float(timeline.bubble):.0%} of each step for other stages, with"
        f" {plural(plan.num_microbatches, 'microbatch', 'microbatches')} on"
        f" {plan.pipeline.num_ranks} ranks; {remedy}"
    )


def _as_named(pipeline: Pipeline, share: int) -> str:
    """How many a schedule needs that is known by name and has the stages where the file has
    them."""
    for name in ("1f1b", "interleaved"):
        if pipeline.rank_of_stage != placement_of(
            name, pipeline.num_ranks, pipeline.stages_per_rank
        ):
            continue
        enough = enough_microbatches(replace(pipeline, schedule_name=name, rows=()), share)
        if enough is not None:
            return f" ({name} with {enough[0]} would wait {enough[2]:.0%})"
    return ""


def nothing_to_put_off(job: Job, plan: Plan) -> str | None:
    """A compiled block does its backward at once: what a schedule puts off is empty."""
    if plan.pipeline is None or not plan.compile or not splits_backward(plan.pipeline.schedule()):
        return None
    name = plan.pipeline.schedule_name
    what = (
        f"schedule {job.parallel.schedule_file if plan.pipeline.rows else name} puts off gradients"
        " of weights (W), "
    )
    what += (
        "and train.compile leaves nothing to put off: compiled blocks do both halves of a backward"
        " at once"
    )
    timeline, layers = plan.pipeline.timeline(), parts_of(job, plan.model_shape).layer_costs
    if timeline is None:
        return what
    now = float(timeline.bubble)
    others = ((instead(plan.pipeline, layers, other), other) for other in ("1f1b", "interleaved"))
    bubble, best = min(
        ((bubble, other) for bubble, other in others if bubble is not None), default=(now, name)
    )
    what += f"; ranks wait {now:.0%} of each step"
    if bubble > WORTH * now:
        return f"{what}, and neither 1f1b nor interleaved has them wait less"
    place = " in place of parallel.schedule_file" if plan.pipeline.rows else ""
    return f"{what}; set parallel.schedule={best}{place} ({bubble:.0%})"
