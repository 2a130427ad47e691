"""A pipeline's step as it was measured: a Timeline of its spans, what each stage takes, and the cut
that follows from that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.plan.pipeline.cut import LayerCosts, StageCut, cut_stages_for_ranks
from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.pipeline.schedule import Action, Schedule
from phalanx.plan.pipeline.simulate import Seconds, StageCosts, Timeline, simulate_timeline

# Of one rank, in the order in which it did them: (action, begin, end) in seconds. JSON makes lists
# of the tuples.
RankSpans = Sequence[Sequence[Any]]
MIN_WORTHWHILE_GAIN = 0.005  # of a step: what a cut must gain to be worth the change


def build_measured_timeline(name: str, spans: Sequence[RankSpans]) -> Timeline:
    """The timeline of a measured step, rank by rank. Its schedule `name` has the actions in the
    order in which they were really done.

    `spans` have one zero, whichever; that of the timeline is the begin of the first action on any
    rank. Raises LayoutError for what is no step of a pipeline.
    """
    try:
        parsed_rows = [_parse_action_spans(row) for row in spans]
    except (TypeError, ValueError, AttributeError):
        raise LayoutError("a span is an action, when it began and when it ended") from None
    zero = math.inf
    num_microbatches = 0
    owners: dict[int, int] = {}  # stage -> rank
    for rank, (actions, times) in enumerate(parsed_rows):
        for action, (start, end) in zip(actions, times, strict=True):
            if not (math.isfinite(start) and start <= end):
                raise _build_bad_spans_error()
            # The first begin on any rank, so that no span of the timeline is negative.
            zero = min(zero, start)
            num_microbatches = max(num_microbatches, action.microbatch + 1)
            owners[action.stage] = rank
    if not owners:
        raise _build_bad_spans_error()
    if sorted(owners) != list(range(len(owners))):
        raise LayoutError(
            f"spans of stages {sorted(owners)}, which are not all stages of a pipeline"
        )
    rank_of_stage = tuple(rank for _, rank in sorted(owners.items()))
    schedule = Schedule(
        name, num_microbatches, rank_of_stage, tuple(actions for actions, _ in parsed_rows)
    )
    spans_s = []
    for _, times in parsed_rows:
        spans_s.append(tuple((start - zero, end - zero) for start, end in times))
    return Timeline(schedule, tuple(spans_s))


def _parse_action_spans(row: RankSpans) -> tuple[tuple[Action, ...], list[tuple[float, float]]]:
    """The actions of a rank, and the begin and end of each."""
    actions, times = [], []
    for action, start, end in row:
        actions.append(Action.from_text(action))
        times.append((float(start), float(end)))
    return tuple(actions), times


def _build_bad_spans_error() -> LayoutError:
    return LayoutError("spans of a pipeline begin before they end, and there is at least one")


def has_split_backward(schedule: Schedule) -> bool:
    """True if some backward is done in halves."""
    return any(action.kind in "IW" for row in schedule.actions for action in row)


def compute_mean_stage_costs(timeline: Timeline) -> tuple[StageCosts, ...]:
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
        weight_s = 0.0
        if halves:
            weight_s = backward_s * mean["W"] / halves
        costs.append(StageCosts(mean["F"], backward_s - weight_s, weight_s))
    return tuple(costs)


def sum_forward_backward_s(cost: StageCosts) -> float:
    """Seconds of forward and backward of one microbatch in a stage."""
    return float(cost.forward_s + cost.backward_input_s + cost.backward_weight_s)


def scale_timeline_to_measurement(
    pipeline: Pipeline, measured: Sequence[StageCosts]
) -> Timeline | None:
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
    planned_s = sum(map(sum_forward_backward_s, pipeline.costs))
    scale = 0.0
    if planned_s:
        scale = sum(map(sum_forward_backward_s, measured)) / planned_s
    return simulate_timeline(
        pipeline.schedule(), [scale_stage_costs(cost, scale) for cost in pipeline.costs]
    )


def scale_stage_costs(cost: StageCosts, factor: float) -> StageCosts:
    return StageCosts(
        float(cost.forward_s) * factor,
        float(cost.backward_input_s) * factor,
        float(cost.backward_weight_s) * factor,
    )


@dataclass(frozen=True)
class ProposedCut:
    """A cut with which a step would take `step_s`, as the schedule goes, where it takes
    `measured_step_s` now."""

    measured: StageCut
    stages: StageCut
    measured_step_s: float
    step_s: float

    @property
    def gain(self) -> float:
        """The part of a step that is saved."""
        if not self.measured_step_s:
            return 0.0
        return 1 - self.step_s / self.measured_step_s

    @property
    def is_worth_it(self) -> bool:
        return self.stages != self.measured and self.gain >= MIN_WORTHWHILE_GAIN


def propose_cut_from_measurement(
    pipeline: Pipeline, measured: StageCut, seconds: Sequence[StageCosts], weights: LayerCosts
) -> ProposedCut:
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
    totals = [sum_forward_backward_s(cost) for cost in seconds]
    layers = _distribute_stage_seconds_to_parts(totals, measured, weights)
    stages = cut_stages_for_ranks(layers, pipeline.rank_of_stage)
    by_kind = []
    for kind in ("forward_s", "backward_input_s", "backward_weight_s"):
        kind_seconds = [getattr(cost, kind) for cost in seconds]
        by_kind.append(
            _distribute_stage_seconds_to_parts(kind_seconds, measured, weights).sum_by_stage(stages)
        )
    costs = [StageCosts(*stage_seconds) for stage_seconds in zip(*by_kind, strict=True)]
    schedule = replace(pipeline, stages=stages).schedule()
    now_s = float(simulate_timeline(schedule, seconds).step_s)
    then_s = float(simulate_timeline(schedule, costs).step_s)
    return ProposedCut(measured, stages, now_s, then_s)


def _distribute_stage_seconds_to_parts(
    seconds: Sequence[Seconds], stages: StageCut, weights: LayerCosts
) -> LayerCosts:
    """Seconds of each part of the model, from those of stages.

    Where parts are said to cost nothing, blocks share them alike.
    """
    blocks: list[Seconds] = []
    embedding: Seconds = 0
    head: Seconds = 0
    last = len(stages.num_blocks) - 1
    for stage, ((first, end), took) in enumerate(zip(stages.block_ranges, seconds, strict=True)):
        before: Seconds = 0
        after: Seconds = 0
        if stage == 0:
            before = weights.embedding
        if stage == last:
            after = weights.head
        weights_of_blocks = list(weights.blocks[first:end])
        if not before + sum(weights_of_blocks) + after:
            # Nothing to go by: the seconds have to be some part's, so blocks share them alike.
            weights_of_blocks = [1] * len(weights_of_blocks)
        total = before + sum(weights_of_blocks) + after
        if not total:  # neither blocks nor anything else that costs
            continue
        blocks += [took * part / total for part in weights_of_blocks]
        embedding += took * before / total
        head += took * after / total
    return LayerCosts(embedding, tuple(blocks), head)
