"""Rules of pipelines: the bubble, micro-batches, and how even the stages are."""

from __future__ import annotations

import math

from phalanx.core.units import format_bytes
from phalanx.plan.advice.facts import PlanFacts
from phalanx.plan.advice.rule import RuleMeasurement, RuleOfThumb

MAX_BUBBLE, GOOD_BUBBLE = 0.20, 0.08
MICROBATCHES_PER_STAGE = 4
MAX_IMBALANCE = 0.05


def measure_pipeline_bubble(facts: PlanFacts) -> RuleMeasurement | None:
    """The part of a step that ranks wait for each other."""
    pp, batch = facts.layout.pp, facts.batch
    if pp == 1:
        return None
    v = facts.stages_per_rank
    # Of the step, as the measured value is; beside the ideal time it is (p-1)/(v m).
    equal_stages_bubble = (pp - 1) / (v * batch.num_microbatches + pp - 1)
    order = "one-forward-one-backward order"
    if v > 1:
        order = f"interleaved order of {v} stages on each rank"
    return RuleMeasurement(
        facts.bubble,
        MAX_BUBBLE,
        comfortable=GOOD_BUBBLE,
        consequence=(
            "ranks wait for each other for that part of the microbatches' time, messages between"
            " stages not counted (equal stages in"
            f" {order} would wait for {100 * equal_stages_bubble:.1f} % of it)"
        ),
        remedy=(
            "more micro-batches (a larger train.global_batch_size or fewer data-parallel ranks),"
            f"{' parallel.stages_per_rank=2,' if v == 1 else ''} or a smaller parallel.pp"
        ),
        missing="the pipeline's simulated step",
    )


def measure_microbatches_per_rank(facts: PlanFacts) -> RuleMeasurement | None:
    """Micro-batches of a step, against four for each rank of the pipeline, or so many fewer as each
    rank has stages."""
    pp, v = facts.layout.pp, facts.stages_per_rank
    if pp == 1:
        return None
    need = -(-MICROBATCHES_PER_STAGE * pp // v)
    reason = f"{MICROBATCHES_PER_STAGE} for each of {pp} ranks"
    if v > 1:
        reason += f", divided by {v} stages on each"
    return RuleMeasurement(
        facts.batch.num_microbatches,
        need,
        consequence=f"too few are under way to fill the pipeline ({reason})",
        remedy=f"{need} micro-batches, or a smaller parallel.pp",
    )


def measure_pipeline_imbalance(facts: PlanFacts) -> RuleMeasurement | None:
    """The share by which the busiest rank of a pipeline works more than the mean."""
    if facts.layout.pp == 1:
        return None
    excess = None
    if facts.busiest_stage_ratio is not None:
        excess = facts.busiest_stage_ratio - 1
    return RuleMeasurement(
        excess,
        MAX_IMBALANCE,
        consequence="every other rank waits for the busiest one; the head is work of its own",
        remedy="fewer blocks beside the head (parallel.stage_blocks), or another parallel.pp",
        missing="the work of each stage",
    )


def measure_zero_stage_in_pipeline(facts: PlanFacts) -> RuleMeasurement | None:
    """The ZeRO stage of a pipeline: its weights and gradients stay whole during a step.

    None where a higher stage earns its place: stage 1 needs more than there is, or is slower.
    """
    if facts.layout.pp == 1 or facts.zero_stage == 0:
        return None
    size = ""
    if facts.zero_stage > 1 and facts.stage_1_bytes is not None:
        if facts.capacity_bytes is not None and facts.stage_1_bytes > facts.capacity_bytes:
            return None
        if (facts.stage_1_step_s or 0.0) > (facts.step_s or math.inf):
            return None
        size = f", {format_bytes(facts.stage_1_bytes)} per rank with stage 1"
        if facts.peak_bytes is not None:
            size += f" and {format_bytes(facts.peak_bytes)} with {facts.zero_stage}"
    return RuleMeasurement(
        facts.zero_stage,
        1,
        consequence=(
            "a pipeline's weights are gathered once and stay whole until the end of the step, as"
            f" its gradients do{size}"
        ),
        remedy="parallel.zero_stage=1",
    )


RULES = (
    RuleOfThumb(
        "pipeline-bubble",
        "Ranks of a pipeline seldom wait",
        "at most",
        "%",
        measure_pipeline_bubble,
        evidence="simulated with this plan's schedule and stages, without messages between stages",
        correction=(
            "(p-1)/m is idle time over ideal time; as a part of the step it is (p-1)/(m+p-1) (E25)."
            " One-forward-one-backward has the same bubble as GPipe and holds fewer activations;"
            " interleaving divides the bubble (E26)."
        ),
    ),
    RuleOfThumb(
        "pipeline-microbatches",
        "Four micro-batches for each rank of a pipeline",
        "at least",
        "micro-batches",
        measure_microbatches_per_rank,
        evidence="m = 4p leaves a bubble of 16 to 19 % for p = 4 to 16; Huang et al. 2019 (GPipe)",
        correction="With v stages on a rank, 4p/v micro-batches leave the same bubble (E26).",
    ),
    RuleOfThumb(
        "stage-balance",
        "Stages have equal work",
        "at most",
        "%",
        measure_pipeline_imbalance,
        evidence="the slowest rank sets the pace of a pipeline; its excess is lost on all others",
    ),
    RuleOfThumb(
        "zero-in-pipeline",
        "A pipeline goes with ZeRO stage 1",
        "at most",
        "as the ZeRO stage",
        measure_zero_stage_in_pipeline,
        evidence="docs/pipeline.md: weights are gathered once per step",
        correction=(
            "ZeRO-3 and a pipeline are often drawn together. DeepSpeed refuses them; elsewhere the"
            " weights travel for every micro-batch, or stay whole for the step (E03)."
        ),
    ),
)
