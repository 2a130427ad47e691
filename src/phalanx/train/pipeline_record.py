"""Measured steps of a pipeline: the spans of its ranks, gathered at a few steps of a run."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from typing import Any

from phalanx.core.clocks import build_monotonic_clock_id
from phalanx.core.phases import PhaseClock
from phalanx.mesh.mesh import Mesh
from phalanx.observe.bus import Bus
from phalanx.observe.events import PipelineMeasured
from phalanx.parallel.model import ParallelModel
from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.pipeline.simulate import Timeline, count_peak_in_flight, simulate_timeline
from phalanx.plan.pipeline.trace import (
    build_measured_timeline,
    compute_mean_stage_costs,
    has_split_backward,
)

# Allocators and caches have settled by then.
FIRST_RECORDED_STEP = 5


def should_record_pipeline(step: int, last_step: int) -> bool:
    """Steps 5, 50, 500, ... and the last: a function of the step alone, so that every rank
    decides alike."""
    if step == last_step:
        return True
    while step > FIRST_RECORDED_STEP and step % 10 == 0:
        step //= 10
    return step == FIRST_RECORDED_STEP


def gather_and_emit_pipeline_spans(
    step: int, last_step: int, model: ParallelModel, bus: Bus
) -> None:
    """Gather the spans of a step and emit them, if there is a pipeline and the step is recorded.

    Collective at these steps. Spans are of the clock that phases are timed by: on a GPU that of its
    events.
    """
    if model.plan.pipeline is None or not should_record_pipeline(step, last_step):
        return
    with model.phases("collective", "gather the spans of the pipeline", axis="pp"):
        by_rank = model.mesh.gather_json(_collect_spans_of_stage_leader(model))
    spans = align_rank_clocks([rank_spans for rank_spans in by_rank if rank_spans is not None])
    # A rank without spans: no bubble can be told from the rest.
    if model.mesh.rank == 0 and all(spans):
        bus.emit(build_pipeline_event(step, model.plan.pipeline, spans))


def _collect_spans_of_stage_leader(model: ParallelModel) -> dict[str, Any] | None:
    """This rank's spans; None unless it leads its stage: the gathered ones are in the order of the
    pipeline, then."""
    if not is_first_rank_of_stage(model.mesh):
        return None
    spans = [] if model.pipeline is None else model.pipeline.spans
    return convert_spans_to_seconds(model.phases.clock, model.finished_at, spans, model.mesh.rank)


def convert_spans_to_seconds(
    clock: PhaseClock, zero: Any, spans: Sequence[tuple[str, Any, Any]], rank: int
) -> dict[str, Any]:
    """A rank's spans in seconds as JSON, the moment `zero` on the same scale, and the name of the
    clock.

    Events of a GPU have seconds only between each other: there `zero`, which comes after all spans,
    is 0.
    """
    if not clock.is_late:
        return {
            "clock": build_monotonic_clock_id() or platform.node(),
            "zero_s": zero,
            "spans": list(spans),
        }
    # `zero` comes after all spans: once it has passed, their events have times.
    clock.wait(zero)
    spans_s = []
    for action, start, end in spans:
        start_s, end_s = clock.seconds(start, zero), clock.seconds(end, zero)
        assert start_s is not None, "a step whose reduction is done has done its actions"
        assert end_s is not None, "a step whose reduction is done has done its actions"
        # Seconds from a span until `zero`: before it, so negative.
        spans_s.append((action, -start_s, -end_s))
    return {"clock": f"the device of rank {rank}", "zero_s": 0.0, "spans": spans_s}


def is_first_rank_of_stage(mesh: Mesh) -> bool:
    """True for the first of the ranks that hold the same stages of a pipeline; for the first of
    all ranks without a pipeline."""
    return all(coordinate == 0 for axis, coordinate in mesh.coordinates.items() if axis != "pp")


def align_rank_clocks(by_rank: Sequence[dict[str, Any]]) -> list[list[tuple[str, float, float]]]:
    """Spans by rank, with one zero.

    On one machine `time.perf_counter` is one clock for all processes, and is taken as it is. Those
    of several machines, and the events of several GPUs, have nothing in common: there each rank's
    zero is when it left the reduction that ended the step, which all ranks leave at about the same
    time (within one trip of a message).
    """
    is_one_clock = len({rank_spans["clock"] for rank_spans in by_rank}) == 1
    aligned = []
    for rank_spans in by_rank:
        zero_s = 0.0
        if not is_one_clock:
            zero_s = rank_spans["zero_s"]
        shifted = []
        for action, start_s, end_s in rank_spans["spans"]:
            shifted.append((action, start_s - zero_s, end_s - zero_s))
        aligned.append(shifted)
    return aligned


def build_pipeline_event(
    step: int, pipeline: Pipeline, spans: Sequence[Sequence[tuple[str, float, float]]]
) -> PipelineMeasured:
    """The event of a measured step. `spans` by pipeline rank, in seconds from any one zero.

    The bubble is predicted twice: from the plan's costs, as it was before the run, and from what
    stages really take, so that costs that were estimated wrong and a schedule that is not followed
    can be told apart.
    """
    # Measured against planned is the error of the costs; what is left against the prediction from
    # stages' own times is sending, and sharing cores.
    measured = build_measured_timeline(pipeline.schedule_name, spans)
    costs = compute_mean_stage_costs(measured)
    planned = pipeline.timeline()
    # NaN where the plan knew no costs.
    bubble_planned = math.nan
    if planned is not None:
        bubble_planned = float(planned.bubble)
    stage_seconds = []
    for cost in costs:
        seconds = (cost.forward_s, cost.backward_input_s, cost.backward_weight_s)
        stage_seconds.append(list(map(float, seconds)))
    return PipelineMeasured(
        step=step,
        schedule=pipeline.schedule_name,
        num_blocks=list(pipeline.stages.num_blocks),
        stage_seconds=stage_seconds,
        splits_backward=has_split_backward(measured.schedule),
        spans=_round_spans_to_tenth_of_us(measured),
        bubble_measured=float(measured.bubble),
        bubble_predicted=float(simulate_timeline(measured.schedule, costs).bubble),
        bubble_planned=bubble_planned,
        in_flight=list(count_peak_in_flight(measured.schedule).per_rank),
    )


def _round_spans_to_tenth_of_us(timeline: Timeline) -> list[list[list[Any]]]:
    """The spans of each rank, rounded to a tenth of a microsecond: events are text."""
    by_rank = []
    for actions, spans_s in zip(timeline.schedule.actions, timeline.spans_s, strict=True):
        rows = []
        for action, (start_s, end_s) in zip(actions, spans_s, strict=True):
            rows.append([str(action), round(float(start_s), 7), round(float(end_s), 7)])
        by_rank.append(rows)
    return by_rank
