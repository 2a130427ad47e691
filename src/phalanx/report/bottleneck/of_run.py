"""`judge_run`: the verdict of a run directory; `judge_step_table`, where its steps were read."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.job.shapes.stored import parse_stored_shape
from phalanx.observe.events import (
    CheckpointSaved,
    EvalFinished,
    OperatorsCounted,
    PipelineMeasured,
    RunStarted,
)
from phalanx.observe.tail import read_recorded_events
from phalanx.plan.calibrated.roofline import Roofline, estimate_roofline
from phalanx.plan.memory_rates import MemoryRates, find_memory_rates
from phalanx.plan.plan import Plan
from phalanx.report.bottleneck.cause import BottleneckVerdict
from phalanx.report.bottleneck.find import find_bottleneck
from phalanx.report.bottleneck.step_table import StepTable, read_step_table
from phalanx.report.bottleneck.study import RunOutline
from phalanx.report.bottleneck.update_traffic import count_update_traffic
from phalanx.report.bubble import MeasuredPipeline
from phalanx.report.formats import dict_or_empty, finite_or_zero, is_same_layout, number_or_nan


def judge_run(
    run_dir: Path, plan: dict[str, Any], job: dict[str, Any] | None = None
) -> BottleneckVerdict | None:
    """The causes that bound the newest steps of a run, beside its plan and job (of plan.json and
    job.json, trusted in nothing); None where no step was recorded."""
    return judge_step_table(run_dir, plan, read_step_table(run_dir), job or {})


def judge_step_table(
    run_dir: Path, plan: dict[str, Any], table: StepTable | None, job: dict[str, Any]
) -> BottleneckVerdict | None:
    """The same of `table`, the newest steps of the run; None without one."""
    if table is None:
        return None
    outline = _outline_run(run_dir, plan, table)
    return find_bottleneck(table, _add_memory_facts(outline, plan, job))


def _add_memory_facts(outline: RunOutline, plan: dict[str, Any], job: dict[str, Any]) -> RunOutline:
    """The outline with what is known of memory bandwidth, on this machine."""
    if not is_same_layout(dict(outline.degrees), _parse_degrees(dict_or_empty(plan.get("layout")))):
        # The plan's bytes and work are those of a rank in another layout.
        return outline
    memory = None
    if outline.device in ("cpu", "cuda"):
        memory = find_memory_rates(outline.device, outline.num_ranks)
    return replace(
        outline,
        update=count_update_traffic(plan, job),
        memory=memory,
        roofline=None if memory is None else _draw_roofline(outline, plan, memory),
    )


def _draw_roofline(
    outline: RunOutline, plan: dict[str, Any], memory: MemoryRates
) -> Roofline | None:
    """The roofline of a plan that a file has, which may be of another release, or damaged."""
    predicted = dict_or_empty(dict_or_empty(plan.get("memory")).get("predicted_bytes"))
    # The backward reads again what the forward wrote.
    touched_bytes = finite_or_zero(number_or_nan(predicted.get("activations")))
    bytes_per_s = memory.find_rate(touched_bytes)
    if not (bytes_per_s > 0 and outline.reference_flops_per_s > 0):
        return None
    try:
        roofline = estimate_roofline(
            Plan.from_json(plan), outline.reference_flops_per_s, bytes_per_s
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, PhalanxError):
        return None
    if roofline is None or not 0 < roofline.products_s + roofline.between_s < math.inf:
        return None
    return roofline


def _outline_run(run_dir: Path, plan: dict[str, Any], table: StepTable) -> RunOutline:
    num_ranks, degrees = find_size_of_attempt(run_dir, plan, table)
    first, last = (table.steps[0], table.steps[-1]) if table.steps else (0, 0)
    evaluations = [
        event
        for event in _select_of_lead(run_dir, EvalFinished, table)
        if first <= event.step < last and math.isfinite(event.wall_s)
    ]
    saves = [
        event
        for event in _select_of_lead(run_dir, CheckpointSaved, table)
        if first <= event.step <= last
    ]
    operators = None
    for event in _select_of_lead(run_dir, OperatorsCounted, table):
        operators = event
    newest = None
    for event in _select_of_lead(run_dir, PipelineMeasured, table):
        newest = event
    return RunOutline(
        device=str(plan.get("device", "")),
        num_ranks=num_ranks,
        num_stages=degrees.get("pp", 1),
        zero_stage=int(finite_or_zero(number_or_nan(plan.get("zero_stage")))),
        is_compiled=plan.get("compile") is True,
        allows_unused=dict_or_empty(plan.get("parallel")).get("unused_parameters") == "allow",
        evaluation_s=sum(event.wall_s for event in evaluations),
        num_evaluations=len(evaluations),
        num_saves=len(saves),
        sent_bytes={"dp": table.newest.sent_bytes, **table.newest.sent_by_axis},
        degrees=degrees,
        operators=operators,
        pipeline=MeasuredPipeline.from_event(newest, plan, run_dir),
        flops_per_token=finite_or_zero(number_or_nan(plan.get("flops_per_token"))),
        hardware_flops_per_token=finite_or_zero(
            number_or_nan(plan.get("hardware_flops_per_token"))
        ),
        peak_flops_per_s=finite_or_zero(number_or_nan(plan.get("peak_flops_per_s"))),
        tokens_per_s=_measure_tokens_per_s(table, _count_step_tokens(plan)),
        global_batch_size=int(finite_or_zero(number_or_nan(plan.get("global_batch_size")))),
    )


def find_size_of_attempt(
    run_dir: Path, plan: dict[str, Any], table: StepTable
) -> tuple[int, dict[str, int]]:
    """The number of ranks and the degrees by axis with which the attempt began, which may be fewer
    than those of the plan; those of the plan where no rank said so."""
    num_ranks, layout = plan.get("world_size"), dict_or_empty(plan.get("layout"))
    for envelope in read_recorded_events(run_dir, RunStarted):
        event = envelope.event
        if isinstance(event, RunStarted) and envelope.attempt == table.attempt:
            num_ranks, layout = event.world_size, event.layout
    known = int(finite_or_zero(number_or_nan(num_ranks)))
    return max(known, table.ranks[-1] + 1), _parse_degrees(layout)


def _parse_degrees(layout: dict[str, Any]) -> dict[str, int]:
    return {
        str(axis): int(number_or_nan(degree))
        for axis, degree in layout.items()
        if math.isfinite(number_or_nan(degree))
    }


def _measure_tokens_per_s(table: StepTable, step_tokens: float) -> float:
    """Tokens per second of the mean step: a single one may have a save in it. Where nobody knows
    the tokens of a step its targets are them, as in plain text."""
    if not table.num_steps or not table.total_s > 0:
        return 0.0
    num_tokens = step_tokens or finite_or_zero(float(table.newest.num_targets))
    return num_tokens * table.num_steps / table.total_s


def _count_step_tokens(plan: dict[str, Any]) -> float:
    """Tokens that the model computes in a step: an image of many patches has one target. 0 where
    the plan does not say, or is damaged."""
    try:
        shape = parse_stored_shape(dict_or_empty(plan.get("shape")))
        sample_tokens = shape.count_sample_tokens(int(plan["seq_len"]))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, PhalanxError):
        return 0.0
    num_samples = number_or_nan(plan.get("global_batch_size"))
    return max(finite_or_zero(num_samples * number_or_nan(sample_tokens)), 0.0)


def _select_of_lead(run_dir: Path, kind: Any, table: StepTable) -> list[Any]:
    """The events of the lead rank in the attempt whose steps are judged."""
    envelopes = read_recorded_events(run_dir, kind, rank=min(table.ranks))
    return [envelope.event for envelope in envelopes if envelope.attempt == table.attempt]
