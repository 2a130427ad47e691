"""A pipeline's step as it was measured: a Timeline of its spans, what each stage takes, and the cut
that follows from that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.plan.pipeline.cut import LayerCosts, Stages, cut_for_ranks
from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.pipeline.schedule import Action, Schedule
from phalanx.plan.pipeline.simulate import Seconds, StageCosts, Timeline, simulate

# Of one rank, in the order in which it did them: (action, begin, end) in seconds. JSON makes lists
# of the tuples.
RankSpans = Sequence[Sequence[Any]]


def build_timeline(name: str, spans: Sequence[RankSpans]) -> Timeline:
    """The timeline of a measured step, rank by rank. Its schedule `name` has the actions in the
    order in which they were really done.

    `spans` have one zero, whichever; that of the timeline is the begin of the first action on any
    rank. Raises LayoutError for what is no step of a pipeline.
    """
    try:
        actions = tuple(tuple(Action.from_text(action) for action, _, _ in row) for row in spans)
        times = [[(float(start), float(end)) for _, start, end in row] for row in spans]
    except (TypeError, ValueError, AttributeError):
        raise LayoutError("a span is an action, when it began and when it ended") from None
    flat = [time for row in times for time in row]
    if not flat or not all(math.isfinite(start) and start <= end for start, end in flat):
        raise LayoutError("spans of a pipeline begin before they end, and there is at least one")
    owner = {action.stage: rank for rank, row in enumerate(actions) for action in row}
    if sorted(owner) != list(range(len(owner))):
        raise LayoutError(
            f"spans of stages {sorted(owner)}, which are not all stages of a pipeline"
        )
    zero = min(start for start, _ in flat)
    num_microbatches = 1 + max(action.microbatch for row in actions for action in row)
    rank_of_stage = tuple(owner[stage] for stage in range(len(owner)))
    return Timeline(
        Schedule(name, num_microbatches, rank_of_stage, actions),
        tuple(tuple((start - zero, end - zero) for start, end in row) for row in times),
    )


def splits_backward(schedule: Schedule) -> bool:
    """True if some backward is done in halves."""
    return any(action.kind in "IW" for row in schedule.actions for action in row)


def mean_stage_costs(timeline: Timeline) -> tuple[StageCosts, ...]:
    """Mean seconds of a microbatch in each stage.

    A stage that only does whole backwards has them as `backward_input_s`, and no
    `backward_weight_s`. One that does both kinds (DualPipe-V) shares all its backward seconds out
    as the halves that it did.
    """
    seconds = [dict.fromkeys("FBIW", 0.0) for _ in timeline.schedule.rank_of_stage]
    counts = [dict.fromkeys("FBIW", 0) for _ in timeline.schedule.rank_of_stage]
    for actions, spans in zip(timeline.schedule.actions, timeline.spans_s, strict=True):
        for action, (start, end) in zip(actions, spans, strict=True):
            seconds[action.stage][action.kind] += float(end - start)
            counts[action.stage][action.kind] += 1
    costs = []
    for took, count in zip(seconds, counts, strict=True):
        mean = {kind: took[kind] / max(1, count[kind]) for kind in took}
        halves = mean["I"] + mean["W"]
        backward_s = (took["B"] + took["I"] + took["W"]) / max(1, count["F"])
        weight_s = backward_s * mean["W"] / halves if halves else 0.0
        costs.append(StageCosts(mean["F"], backward_s - weight_s, weight_s))
    return tuple(costs)


def total_seconds(cost: StageCosts) -> float:
    """Seconds of forward and backward of one microbatch in a stage."""
    return float(cost.forward_s + cost.backward_input_s + cost.backward_weight_s)


def scale_to_measured(pipeline: Pipeline, measured: Sequence[StageCosts]) -> Timeline | None:
    """The plan's timeline in seconds: its costs, scaled so that their mean over stages is the
    measured one.

    None where the plan has no costs. Raises LayoutError for other stages than the plan's.
    """
    if not pipeline.costs:
        return None
    if len(measured) != len(pipeline.costs):
        raise LayoutError(
            f"{len(measured)} stages were measured, and {len(pipeline.costs)} planned"
        )
    planned_s = sum(map(total_seconds, pipeline.costs))
    scale = sum(map(total_seconds, measured)) / planned_s if planned_s else 0.0
    return simulate(pipeline.schedule(), [scale_costs(cost, scale) for cost in pipeline.costs])


def scale_costs(cost: StageCosts, factor: float) -> StageCosts:
    return StageCosts(
        float(cost.forward_s) * factor,
        float(cost.backward_input_s) * factor,
        float(cost.backward_weight_s) * factor,
    )


WORTH_S = 0.005  # of a step: what a cut must gain to be worth the change


@dataclass(frozen=True)
class Recut:
    """A cut with which a step would take `step_s`, as the schedule goes, where it takes
    `measured_step_s` now."""

    measured: Stages
    stages: Stages
    measured_step_s: float
    step_s: float

    @property
    def gain(self) -> float:
        """The part of a step that is saved."""
        return 1 - self.step_s / self.measured_step_s if self.measured_step_s else 0.0

    @property
    def is_worth_it(self) -> bool:
        return self.stages != self.measured and self.gain >= WORTH_S


def recut(
    pipeline: Pipeline, measured: Stages, seconds: Sequence[StageCosts], weights: LayerCosts
) -> Recut:
    """The cut of `pipeline`'s schedule by the `seconds` that stages with `measured` blocks took of
    one microbatch.

    `weights`: what the model's parts should cost, on any scale. A stage's seconds are shared out
    among its blocks, embedding and head in these proportions, each kind of work for itself. Raises
    LayoutError for the measurement of other stages, or of another number of blocks.
    """
    if len(seconds) != pipeline.num_stages or len(measured.num_blocks) != pipeline.num_stages:
        raise LayoutError(
            f"{len(seconds)} stages were measured, and the job has {pipeline.num_stages}",
            fix="give a run of this job: parallel.pp, schedule and stages_per_rank as they are now",
        )
    if sum(measured.num_blocks) != len(weights.blocks):
        raise LayoutError(
            f"stages of {sum(measured.num_blocks)} blocks were measured, and the model has"
            f" {len(weights.blocks)}",
            fix="give a run of this model",
        )
    forward = _distribute_seconds([cost.forward_s for cost in seconds], measured, weights)
    inputs = _distribute_seconds([cost.backward_input_s for cost in seconds], measured, weights)
    of_weights = _distribute_seconds(
        [cost.backward_weight_s for cost in seconds], measured, weights
    )
    totals = _distribute_seconds([total_seconds(cost) for cost in seconds], measured, weights)
    stages = cut_for_ranks(totals, pipeline.rank_of_stage)
    kinds = [kind.of_stages(stages) for kind in (forward, inputs, of_weights)]
    costs = [StageCosts(*of_stage) for of_stage in zip(*kinds, strict=True)]
    schedule = replace(pipeline, stages=stages).schedule()
    now_s, then_s = (float(simulate(schedule, of).step_s) for of in (seconds, costs))
    return Recut(measured, stages, now_s, then_s)


def _distribute_seconds(
    seconds: Sequence[Seconds], stages: Stages, weights: LayerCosts
) -> LayerCosts:
    """Seconds of each part of the model, from those of stages.

    Where parts are said to cost nothing, blocks share them alike.
    """
    blocks: list[Seconds] = []
    embedding: Seconds = 0
    head: Seconds = 0
    last = len(stages.num_blocks) - 1
    for stage, ((first, end), took) in enumerate(zip(stages.ranges, seconds, strict=True)):
        before = weights.embedding if stage == 0 else 0
        after = weights.head if stage == last else 0
        weights_of_blocks = list(weights.blocks[first:end])
        if not before + sum(weights_of_blocks) + after:
            weights_of_blocks = [1] * len(weights_of_blocks)
        total = before + sum(weights_of_blocks) + after
        blocks += [took * part / total for part in weights_of_blocks]
        embedding += took * before / total if total else 0
        head += took * after / total if total else 0
    return LayerCosts(embedding, tuple(blocks), head)
