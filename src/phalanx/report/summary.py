"""A run's facts for programs: what `phalanx train --json` ends with and `phalanx report --json`
prints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from phalanx.checkpoint.folder import LocalCheckpointFolder
from phalanx.checkpoint.manifest import list_checkpoint_paths_of_run
from phalanx.core.errors import CheckpointError
from phalanx.observe import events
from phalanx.report.bottleneck.cause import BottleneckVerdict
from phalanx.report.bottleneck.describe import describe_bottleneck
from phalanx.report.expert_facts import compute_max_over_mean_load
from phalanx.report.facts import RunFacts
from phalanx.report.invariant_facts import InvariantFacts
from phalanx.report.ledger import RankLedger
from phalanx.report.percentiles import compute_median_of_finite
from phalanx.report.run_status import describe_last_failure, find_job_of_run, find_run_end


def build_run_json(facts: RunFacts) -> dict[str, Any]:
    """Numbers that were never measured are None.

    Losses are per target: nats per token where `loss_unit` says so.
    """
    end, job = find_run_end(facts), find_job_of_run(facts)
    return {
        "run_dir": str(facts.run_dir),
        "name": facts.name,
        "status": facts.status,
        # None where its job cannot be seen from here.
        "is_running": job.is_alive if job is not None else False,
        "exit_code": int(end.exit_code) if end is not None else None,
        "failure": describe_last_failure(facts) or None,
        "step": facts.last_step,
        "total_steps": facts.total_steps,
        "num_restarts": facts.num_restarts,
        "num_resumes": facts.num_resumes,
        "num_steps_redone": facts.num_redone,
        "num_steps_skipped": len(facts.skipped),
        "loss_unit": facts.units.loss or None,
        "final_loss": None if facts.final_loss is None else _number_or_none(facts.final_loss[1]),
        "evaluations": [_build_evaluation_json(event) for event in facts.evals],
        "best": _build_best_evaluation_json(facts),
        "baselines": list(map(_build_baseline_json, facts.baselines)),
        "tokens_per_s": _number_or_none(facts.tokens_per_s),
        "sent_bytes_per_step": _number_or_none(compute_median_of_finite(facts.steps.sent_bytes)),
        **{
            # None where nothing goes over the axis.
            f"sent_{axis}_bytes_per_step": _number_or_none(compute_median_of_finite(sent_bytes))
            or None
            for axis, sent_bytes in facts.steps.sent_by_axis.items()
        },
        "wall_s": _number_or_none(facts.wall_s),
        "layout": facts.layout,
        "world_size": facts.world_size,
        "device": facts.device or None,
        "memory": [_build_memory_json(rank, facts.memory[rank]) for rank in sorted(facts.memory)],
        "pipeline": _build_pipeline_json(facts),
        "experts": _build_experts_json(facts),
        "drifts": [
            {
                "kind": drift.kind,
                "rank": drift.rank,
                "per_step": drift.slope.per_step,
                "at_least_per_step": drift.slope.least,
                "start": drift.slope.start,
                "num_steps": round(drift.slope.num_steps),
            }
            for drift in facts.drifts
        ],
        "block_norms": _build_block_norms_json(facts),
        "reliability": facts.reliability.to_json(),
        "ledger": [_build_ledger_json(ledger) for ledger in facts.rank_ledgers],
        "collectives": [caller.to_json() for caller in facts.callers],
        "bottleneck": _build_bottleneck_json(facts.bottleneck) if facts.bottleneck else None,
        "invariants": [_build_invariant_json(invariant) for invariant in facts.invariants],
        "checkpoints": _list_checkpoint_names(facts),
        "warnings": list(facts.warnings),
        "report": _find_report_path(facts),
    }


def _build_evaluation_json(event: events.EvalFinished) -> dict[str, Any]:
    return {
        "step": int(event.step),
        "loss": _number_or_none(event.loss),
        "num_targets": int(event.num_targets),
        "loss_by_source": event.loss_by_source,
        "metrics": event.metrics,
        "wall_s": _number_or_none(event.wall_s),
    }


def _build_baseline_json(event: events.BaselineMeasured) -> dict[str, Any]:
    return {
        "name": event.name,
        "loss": _number_or_none(event.loss),
        "num_targets": int(event.num_targets),
    }


def _build_best_evaluation_json(facts: RunFacts) -> dict[str, Any] | None:
    """The best evaluation, and the checkpoint that was kept of it, if one was."""
    best, kept_best = facts.find_best_evaluation, facts.kept_best
    if best is None:
        return None
    checkpoint = None
    # RUN/best.json names a step once its checkpoint is there: a better one may be newer.
    if kept_best is not None and kept_best.step == best.step:
        checkpoint = kept_best.checkpoint
    return {
        "step": int(best.step),
        "loss": _number_or_none(best.loss),
        "metric": best.judged_by,
        "value": _number_or_none(best.value_of(best.judged_by)),
        "checkpoint": checkpoint,
    }


def _build_ledger_json(ledger: RankLedger) -> dict[str, Any]:
    """Seconds of a rank: `parts_s` and `unattributed_s` are those of `wall_s`."""
    return {
        "rank": ledger.rank,
        "wall_s": round(ledger.wall_s, 4),
        "parts_s": {name: round(seconds, 4) for name, seconds in ledger.parts_s.items()},
        "unattributed_s": round(ledger.unattributed_s, 4),
        "counted_twice_s": round(ledger.counted_twice_s, 4),
        "communication_s": {
            name: round(seconds, 4) for name, seconds in ledger.communication_s.items()
        },
        "num_steps": ledger.num_steps,
        "is_supervised": ledger.is_supervised,
    }


def _build_pipeline_json(facts: RunFacts) -> dict[str, Any] | None:
    """The last step of a pipeline that was measured; shares of the ranks' time, 0 to 1."""
    if not facts.pipelines:
        return None
    last = facts.pipelines[-1]
    return {
        "step": int(last.step),
        "schedule": last.schedule,
        "num_blocks": last.num_blocks,
        "stage_seconds": last.stage_seconds,
        "bubble_measured": _number_or_none(last.bubble_measured),
        "bubble_predicted": _number_or_none(last.bubble_predicted),
        "bubble_planned": _number_or_none(last.bubble_planned),
        "in_flight": last.in_flight,
    }


def _build_block_norms_json(facts: RunFacts) -> dict[str, Any] | None:
    """The last step whose norms were measured, by block of the model."""
    if not facts.block_norms.steps:
        return None
    last = facts.block_norms.steps[-1]
    return {
        "step": int(last.step),
        "gradient_norms": last.gradient_norms,
        "update_norms": last.update_norms,
        "weight_norms": last.weight_norms,
        "nonfinite": last.nonfinite,
    }


def _build_experts_json(facts: RunFacts) -> dict[str, Any] | None:
    """The last step in which experts were counted: of the worst layer the busiest expert over the
    mean, and the share of all choices that was dropped, 0 to 1."""
    experts = facts.experts
    if not experts.has_expert_steps:
        return None
    return {
        "step": experts.step,
        "max_over_mean": max(map(compute_max_over_mean_load, experts.tokens.values())),
        "dropped_share": experts.newest_dropped_share,
    }


def _build_bottleneck_json(verdict: BottleneckVerdict) -> dict[str, Any]:
    return {"sentence": describe_bottleneck(verdict), **verdict.to_json()}


def _build_invariant_json(facts: InvariantFacts) -> dict[str, Any]:
    """The checks of one invariant; `ok` is None where nothing could be."""
    return {
        "name": facts.name,
        "ok": facts.has_held,
        "num_checks": facts.num_checks,
        "num_failed": facts.num_failed,
        "last_step": facts.last_step,
        "looked_at": facts.looked_at or None,
        "not_looked_at": facts.not_looked_at,
        "failures": [_build_failure_json(event) for event in facts.failures],
    }


def _build_failure_json(event: events.InvariantChecked) -> dict[str, Any]:
    return {
        "step": int(event.step),
        "tensors": event.tensors,
        "num_tensors": int(event.num_tensors),
        "ranks": [int(rank) for rank in event.ranks],
        "expected": _number_or_none(event.expected),
        "actual": _number_or_none(event.actual),
    }


def _build_memory_json(rank: int, event: events.MemoryMeasured) -> dict[str, Any]:
    return {
        "rank": rank,
        "predicted_bytes": event.predicted_bytes,
        "measured_bytes": event.measured_bytes,
        "runtime_bytes": int(event.runtime_bytes),
        "peak_step": int(event.peak_step),
        "peak_phase": str(event.peak_phase),
        "device_bytes": event.device_bytes,
    }


def _list_checkpoint_names(facts: RunFacts) -> list[dict[str, Any]]:
    """The checkpoints that exist, oldest first.

    For a remote store, or a directory that cannot be read, the run's own events count.
    """
    saved_by_step: dict[int, events.CheckpointSaved] = {}
    for envelope in facts.story:
        event = envelope.event
        if isinstance(event, events.CheckpointSaved):
            saved_by_step[event.step] = event
        elif isinstance(event, events.CheckpointsRemoved):
            for step in event.steps:
                saved_by_step.pop(step, None)
    recorded = []
    is_elsewhere = False
    for step, saved in sorted(saved_by_step.items()):
        recorded.append({"step": step, "path": saved.path, "num_bytes": saved.num_bytes})
        # A URL or an absolute path: not where `list_checkpoint_paths_of_run` looks.
        is_elsewhere |= "://" in saved.path or Path(saved.path).is_absolute()
    if is_elsewhere:
        return recorded
    try:
        paths = list_checkpoint_paths_of_run(facts.run_dir)
    except CheckpointError:
        return recorded
    checkpoints: list[dict[str, Any]] = []
    for path in paths:
        step = LocalCheckpointFolder(path).step
        num_bytes = None
        if step in saved_by_step:
            num_bytes = saved_by_step[step].num_bytes
        checkpoints.append(
            {"step": step, "path": str(path.relative_to(facts.run_dir)), "num_bytes": num_bytes}
        )
    return checkpoints


def _find_report_path(facts: RunFacts) -> str | None:
    path = facts.run_dir / "report.html"
    if not path.exists():
        return None
    return str(path)


def _number_or_none(value: float) -> float | None:
    # JSON has no NaN and no infinity.
    if not math.isfinite(value):
        return None
    return value
