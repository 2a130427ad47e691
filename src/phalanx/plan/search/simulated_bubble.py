"""The bubble of a pipeline by running its schedule on paper, with the stages as they are cut and
the messages between them, in place of a closed form."""

from __future__ import annotations

import math
from dataclasses import replace

from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.pipeline.simulate import StageCosts
from phalanx.plan.timing.step_time import StepTime

# What a rank does in a microbatch: all but what a step has once, and waiting.
MICROBATCH_TERMS = ("ideal", "matmul loss", "attention", "elementwise", "tp", "cp", "ep")


def add_simulated_bubble(
    time: StepTime, pipeline: Pipeline, num_microbatches: int, send_s: float
) -> StepTime:
    """`time` with the bubble that the schedule of `pipeline` has; the interval moves along.

    A pipeline may be planned with fewer microbatches than the `num_microbatches` of its step.
    `send_s`: seconds of one message between stages.
    """
    if not pipeline.costs or pipeline.rows:
        return time
    computed_s = sum(time.terms[term] for term in MICROBATCH_TERMS)
    # Stages say how they compare to each other; the terms, how long the mean rank takes in all.
    of_mean_rank = sum(float(cost.seconds) for cost in pipeline.costs) / pipeline.num_ranks
    if not of_mean_rank or not computed_s:
        return time
    scale = computed_s / num_microbatches / of_mean_rank
    scaled = []
    for cost in pipeline.costs:
        parts = cost.forward_s, cost.backward_input_s, cost.backward_weight_s
        scaled.append(StageCosts(*(float(part) * scale for part in parts)))
    step_s = pipeline.estimate_step_s(scaled, num_microbatches, send_s)
    return replace_bubble(time, max(0.0, step_s - computed_s))


def replace_bubble(time: StepTime, bubble_s: float) -> StepTime:
    """`time` with another bubble: the interval keeps its width in parts of the step."""
    terms = dict(time.terms)
    before = time.total_s
    terms["bubble"] = bubble_s
    # Jitter is a part of all else.
    seconds_without_jitter = sum(
        seconds for term, seconds in time.terms.items() if term != "jitter"
    )
    if seconds_without_jitter:
        terms["jitter"] *= (
            seconds_without_jitter - time.terms["bubble"] + bubble_s
        ) / seconds_without_jitter
    ratio = sum(terms.values()) / before
    assert math.isfinite(ratio)
    return replace(time, terms=terms, low_s=time.low_s * ratio, high_s=time.high_s * ratio)
