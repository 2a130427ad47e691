"""A pipeline's step as it was measured: a Timeline of its spans, what each stage takes, and what
follows from that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.plan.pipeline.planned import Pipeline
from phalanx.plan.pipeline.schedule import Action, Schedule
from phalanx.plan.pipeline.simulate import StageCosts, Timeline, simulate

# Of one rank, in the order in which it did them: (action, begin, end) in seconds. JSON makes lists
# of the tuples.
RankSpans = Sequence[Sequence[Any]]


def measured_timeline(name: str, spans: Sequence[RankSpans]) -> Timeline:
    """The step that ranks did, rank by rank, in which schedule `name` is what they really did in
    which order.

    `spans` have one zero, whichever; that of the timeline is the begin of the first action on any
    rank. Raises LayoutError for what is no step of a pipeline.
    """
    try:
        actions = tuple(tuple(Action.from_text(action) for action, _, _ in row) for row in spans)
        times = [[(float(begin), float(end)) for _, begin, end in row] for row in spans]
    except (TypeError, ValueError, AttributeError):
        raise LayoutError("a span is an action, when it began and when it ended") from None
    flat = [time for row in times for time in row]
    if not flat or not all(math.isfinite(begin) and begin <= end for begin, end in flat):
        raise LayoutError("spans of a pipeline begin before they end, and there is at least one")
    owner = {action.stage: rank for rank, row in enumerate(actions) for action in row}
    if sorted(owner) != list(range(len(owner))):
        raise LayoutError(
            f"spans of stages {sorted(owner)}, which are not all stages of a pipeline"
        )
    zero = min(begin for begin, _ in flat)
    num_microbatches = 1 + max(action.microbatch for row in actions for action in row)
    rank_of_stage = tuple(owner[stage] for stage in range(len(owner)))
    return Timeline(
        Schedule(name, num_microbatches, rank_of_stage, actions),
        tuple(tuple((begin - zero, end - zero) for begin, end in row) for row in times),
    )


def splits_backward(schedule: Schedule) -> bool:
    """Whether some backward is done in halves."""
    return any(action.kind in "IW" for row in schedule.actions for action in row)


def measured_costs(timeline: Timeline) -> tuple[StageCosts, ...]:
    """Mean seconds of a microbatch in each stage.

    A stage that only does whole backwards has them as `backward_input_s`, and no
    `backward_weight_s`. One that does both kinds (DualPipe-V) shares all its backward seconds out
    as the halves that it did.
    """
    seconds = [dict.fromkeys("FBIW", 0.0) for _ in timeline.schedule.rank_of_stage]
    counts = [dict.fromkeys("FBIW", 0) for _ in timeline.schedule.rank_of_stage]
    for actions, spans in zip(timeline.schedule.actions, timeline.spans_s, strict=True):
        for action, (begin, end) in zip(actions, spans, strict=True):
            seconds[action.stage][action.kind] += float(end - begin)
            counts[action.stage][action.kind] += 1
    found = []
    for took, count in zip(seconds, counts, strict=True):
        mean = {kind: took[kind] / max(1, count[kind]) for kind in took}
        halves = mean["I"] + mean["W"]
        backward_s = (took["B"] + took["I"] + took["W"]) / max(1, count["F"])
        weight_s = backward_s * mean["W"] / halves if halves else 0.0
        found.append(StageCosts(mean["F"], backward_s - weight_s, weight_s))
    return tuple(found)


def total_s(cost: StageCosts) -> float:
    """Forward and backward."""
    return float(cost.forward_s + cost.backward_input_s + cost.backward_weight_s)


def planned_at(pipeline: Pipeline, measured: Sequence[StageCosts]) -> Timeline | None:
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
    planned_s = sum(map(total_s, pipeline.costs))
    scale = sum(map(total_s, measured)) / planned_s if planned_s else 0.0
    return simulate(pipeline.schedule(), [times(cost, scale) for cost in pipeline.costs])


def times(cost: StageCosts, factor: float) -> StageCosts:
    return StageCosts(
        float(cost.forward_s) * factor,
        float(cost.backward_input_s) * factor,
        float(cost.backward_weight_s) * factor,
    )
