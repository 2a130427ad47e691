"""`phalanx plan JOB.toml --recut RUN`: another cut of the model into stages, by what those of a run took."""

from __future__ import annotations

from pathlib import Path

from phalanx.cli._json import print_json
from phalanx.core.errors import LayoutError, UsageError
from phalanx.job.schema import Job
from phalanx.observe.events import PipelineMeasured
from phalanx.observe.tail import recorded
from phalanx.plan.pipeline.cut import Stages
from phalanx.plan.pipeline.parts import parts_of
from phalanx.plan.pipeline.recut import Recut, recut
from phalanx.plan.pipeline.simulate import StageCosts
from phalanx.plan.plan import Plan


def print_recut(job: Job, plan: Plan, run_dir: Path, *, as_json: bool) -> int:
    """Raises UsageError for a run without a measured pipeline, LayoutError for one of another pipeline."""
    if plan.pipeline is None:
        raise UsageError(
            "--recut is for pipelines, and parallel.pp is 1", fix="give the job file and keys that the run had"
        )
    event = _last_measured(run_dir)
    try:
        seconds = [StageCosts(*row) for row in event.stage_seconds]
    except TypeError:
        raise LayoutError("stages have three numbers, and these have not", where=str(run_dir)) from None
    # Recomputation is in what was measured, and so not in what shares it out.
    weights = parts_of(job, plan.model_shape).layer_costs
    found = recut(plan.pipeline, Stages(tuple(event.num_blocks)), seconds, weights)
    if as_json:
        body = {
            "run": str(run_dir),
            "step": event.step,
            "measured_stage_blocks": list(found.measured.num_blocks),
            "stage_blocks": list(found.stages.num_blocks) if found.is_worth_it else list(found.measured.num_blocks),
            "is_best": not found.is_worth_it,
            "gain": found.gain if found.is_worth_it else 0.0,
        }
        print_json("recut", body, indent=1)
    else:
        print("\n".join(_lines(found, event, seconds)))
    return 0


def _last_measured(run_dir: Path) -> PipelineMeasured:
    found: PipelineMeasured | None = None
    for envelope in recorded(run_dir, PipelineMeasured):
        if isinstance(envelope.event, PipelineMeasured):
            found = envelope.event
    if found is None:
        raise UsageError(
            f"{run_dir} has no measured pipeline", fix="train with parallel.pp for 5 steps or more, and give that run"
        )
    return found


def _lines(found: Recut, event: PipelineMeasured, seconds: list[StageCosts]) -> list[str]:
    took = ", ".join(f"{1e3 * float(sum((c.forward_s, c.backward_input_s, c.backward_weight_s))):.3g}" for c in seconds)
    now = ", ".join(map(str, found.measured.num_blocks))
    lines = [f"measured  stages of {now} blocks took {took} ms of a microbatch in step {event.step} ({event.schedule})"]
    if not found.is_worth_it:
        return [*lines, "recut     the cut is already the best there is"]
    then = ", ".join(map(str, found.stages.num_blocks))
    return [*lines, f"recut     parallel.stage_blocks=[{then}]: a step takes {found.gain:.1%} less, as predicted"]
