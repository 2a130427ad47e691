"""Another cut of a model into pipeline stages, by what the stages of a run took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import LayoutError, UsageError
from phalanx.job.schema import Job
from phalanx.observe.events import PipelineMeasured
from phalanx.observe.tail import read_recorded_events
from phalanx.plan.pipeline.costs import compute_model_part_costs
from phalanx.plan.pipeline.cut import StageCut
from phalanx.plan.pipeline.simulate import StageCosts
from phalanx.plan.pipeline.trace import ProposedCut, propose_cut_from_measurement
from phalanx.plan.plan import Plan


@dataclass(frozen=True)
class SuggestedPipelineCut:
    """The cut that would suit the stages of `run_dir` best, beside what was measured there."""

    run_dir: Path
    event: PipelineMeasured
    seconds: tuple[StageCosts, ...]
    recut: ProposedCut

    def to_json(self) -> dict[str, Any]:
        """The body of phalanx.recut/1."""
        recut = self.recut
        stages, gain = recut.measured, 0.0
        if recut.is_worth_it:
            stages, gain = recut.stages, recut.gain
        return {
            "run": str(self.run_dir),
            "step": self.event.step,
            "measured_stage_blocks": list(recut.measured.num_blocks),
            "stage_blocks": list(stages.num_blocks),
            "is_best": not recut.is_worth_it,
            "gain": gain,
        }

    def lines(self) -> list[str]:
        """Lines for people."""
        return _build_cut_summary_lines(self.recut, self.event, self.seconds)


def suggest_pipeline_cut_from_run(job: Job, plan: Plan, run_dir: Path) -> SuggestedPipelineCut:
    """Cut the pipeline of `plan` anew, by the seconds that the run in `run_dir` measured.

    Raises UsageError for a run without a measured pipeline, LayoutError for one of another
    pipeline.
    """
    if plan.pipeline is None:
        raise UsageError(
            "--recut is for pipelines, and parallel.pp is 1",
            fix="give the job file and keys that the run had",
        )
    event = _find_last_measured_step(run_dir)
    try:
        seconds = [StageCosts(*row) for row in event.stage_seconds]
    except TypeError:
        raise LayoutError(
            "stages have three numbers, and these have not", where=str(run_dir)
        ) from None
    # Recomputation is in what was measured, and so not in what shares it out.
    weights = compute_model_part_costs(job, plan.model_shape).layer_costs
    return SuggestedPipelineCut(
        run_dir,
        event,
        tuple(seconds),
        propose_cut_from_measurement(
            plan.pipeline, StageCut(tuple(event.num_blocks)), seconds, weights
        ),
    )


def _find_last_measured_step(run_dir: Path) -> PipelineMeasured:
    newest: PipelineMeasured | None = None
    for envelope in read_recorded_events(run_dir, PipelineMeasured):
        if isinstance(envelope.event, PipelineMeasured):
            newest = envelope.event
    if newest is None:
        raise UsageError(
            f"{run_dir} has no measured pipeline",
            fix="train with parallel.pp for 5 steps or more, and give that run",
        )
    return newest


def _build_cut_summary_lines(
    recut: ProposedCut, event: PipelineMeasured, seconds: Sequence[StageCosts]
) -> list[str]:
    milliseconds = []
    for costs in seconds:
        stage_s = sum((costs.forward_s, costs.backward_input_s, costs.backward_weight_s))
        milliseconds.append(f"{1e3 * float(stage_s):.3g}")
    took = ", ".join(milliseconds)
    now = ", ".join(map(str, recut.measured.num_blocks))
    lines = [
        f"measured  stages of {now} blocks took {took} ms of a microbatch in step {event.step}"
        f" ({event.schedule})"
    ]
    if not recut.is_worth_it:
        return [*lines, "recut     the cut is already the best there is"]
    then = ", ".join(map(str, recut.stages.num_blocks))
    return [
        *lines,
        (
            f"recut     parallel.stage_blocks=[{then}]: a step takes {recut.gain:.1%} less, as"
            " predicted"
        ),
    ]
