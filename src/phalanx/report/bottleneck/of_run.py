"""`judge_run`: the verdict of a run directory; `judge_step_table`, where its steps were read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from phalanx.observe.events import CheckpointSaved, EvalFinished, OperatorsCounted, PipelineMeasured
from phalanx.observe.tail import read_recorded_events
from phalanx.report.bottleneck.cause import BottleneckVerdict
from phalanx.report.bottleneck.find import find_bottleneck
from phalanx.report.bottleneck.step_table import StepTable, read_step_table
from phalanx.report.bottleneck.study import RunOutline
from phalanx.report.bubble import MeasuredPipeline
from phalanx.report.formats import dict_or_empty, finite_or_zero, number_or_nan


def judge_run(run_dir: Path, plan: dict[str, Any]) -> BottleneckVerdict | None:
    """The causes that bound the newest steps of a run, beside its plan (of plan.json, trusted in
    nothing); None where no step was recorded."""
    return judge_step_table(run_dir, plan, read_step_table(run_dir))


def judge_step_table(
    run_dir: Path, plan: dict[str, Any], table: StepTable | None
) -> BottleneckVerdict | None:
    """The same of `table`, the newest steps of the run; None without one."""
    if table is None:
        return None
    return find_bottleneck(table, _outline_run(run_dir, plan, table))


def _outline_run(run_dir: Path, plan: dict[str, Any], table: StepTable) -> RunOutline:
    degrees = {
        str(axis): int(number_or_nan(degree))
        for axis, degree in dict_or_empty(plan.get("layout")).items()
        if math.isfinite(number_or_nan(degree))
    }
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
        tokens_per_s=_measure_tokens_per_s(table),
    )


def _measure_tokens_per_s(table: StepTable) -> float:
    """Tokens per second of the mean step: a single one may have a save in it."""
    if not table.num_steps or not table.total_s > 0:
        return 0.0
    return finite_or_zero(float(table.newest.num_targets)) * table.num_steps / table.total_s


def _select_of_lead(run_dir: Path, kind: Any, table: StepTable) -> list[Any]:
    """The events of the lead rank in the attempt whose steps are judged."""
    envelopes = read_recorded_events(run_dir, kind, rank=min(table.ranks))
    return [envelope.event for envelope in envelopes if envelope.attempt == table.attempt]
