"""Training from Python: `phalanx.train_job(job)`, with the same supervision as `phalanx train`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import ExitCode, PhalanxError
from phalanx.core.output import silence
from phalanx.core.registry import refuse_during_user_import
from phalanx.job.load import check_job
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan
from phalanx.report.reduce import collect_run_facts
from phalanx.report.summary import build_run_json
from phalanx.run.conclude import RunEnd
from phalanx.run.output import RunOutput
from phalanx.run.resume import load_resumed_job
from phalanx.run.training import TrainRequest, train_in_ranks_or_as_rank


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    `status` is "finished" | "preempted" | "interrupted" | "failed", `exit_code` that of `phalanx
    train`, and `error` what it would print where the run is not finished, the reason in its first
    line. `warnings` say what its owner may regret: that no step was applied, for one. `metrics` are
    of the last step that was applied (`loss`) and of the last evaluation (`held_out_loss`, and
    those of your objective as `held_out_NAME`); losses are per target. `newest_checkpoint` is a
    path or a URL, None without one.
    """

    run_dir: Path
    status: str
    exit_code: int
    error: str
    last_step: int
    metrics: Mapping[str, float]
    newest_checkpoint: str | None
    plan: Plan
    warnings: tuple[str, ...] = ()


def train_job(job: Job, *, quiet: bool = False) -> RunResult:
    """Train `job` to its last step and return what came out, also of a run that failed or was
    stopped.

    Ranks are started and supervised as `phalanx train` does it: in processes of their own, started
    again after a crash. The run directory is `run.dir`, else a new one under runs/. With `quiet`
    nothing is printed. Works from a script, a notebook and any thread; in the main thread Ctrl-C
    saves and stops. As one rank of another launcher (torchrun), all ranks call it, equally
    often.

    Raises PhalanxError for what the user can mend before the first step: a job that cannot run,
    data or a layout that does not fit, a run directory in use.
    """
    refuse_during_user_import("train_job")
    return _run_training_request(TrainRequest.for_new_run(check_job(job)), quiet)


def resume_job(
    run_dir: str | Path, overrides: Sequence[str] = (), *, quiet: bool = False
) -> RunResult:
    """Continue the run in `run_dir` from its newest checkpoint, with `key=value` overrides on its
    job.

    As `phalanx train --resume`; a run that is finished returns at once. Raises PhalanxError like
    `train_job`, and JobError for keys that a run keeps.
    """
    refuse_during_user_import("resume_job")
    return _run_training_request(
        TrainRequest.for_resumed_run(load_resumed_job(str(run_dir), overrides)), quiet
    )


def _run_training_request(request: TrainRequest, quiet: bool) -> RunResult:
    with silence() if quiet else nullcontext():
        end = train_in_ranks_or_as_rank(request, RunOutput(quiet=quiet), guards_rank=False)
    if end.refusal is not None:
        # A script has no other way to learn of it.
        raise end.refusal
    return _build_run_result(end)


def _build_run_result(end: RunEnd) -> RunResult:
    """The result of a run that has a plan, with facts from its events."""
    if end.plan is None:
        raise PhalanxError("the run has no plan", where=str(end.run_dir))
    # From the events, as `report --json` does: ranks were other processes.
    facts = build_run_json(collect_run_facts(end.run_dir))
    metrics: dict[str, float] = {}
    if facts["final_loss"] is not None:
        metrics["loss"] = facts["final_loss"]
    if facts["evaluations"]:
        last = facts["evaluations"][-1]
        if last["loss"] is not None:
            metrics["held_out_loss"] = last["loss"]
        for name, value in last["metrics"].items():
            metrics[f"held_out_{name}"] = value
    newest_checkpoint = None
    if facts["checkpoints"]:
        newest_checkpoint = _resolve_checkpoint_location(
            end.run_dir, facts["checkpoints"][-1]["path"]
        )
    error = ""
    if end.exit_code != ExitCode.OK:
        error = end.message
    return RunResult(
        run_dir=end.run_dir,
        status=end.status,
        exit_code=end.exit_code,
        error=error,
        last_step=facts["step"],
        metrics=metrics,
        newest_checkpoint=newest_checkpoint,
        plan=end.plan,
        warnings=tuple(facts["warnings"]),
    )


def _resolve_checkpoint_location(run_dir: Path, path: str) -> str:
    """A checkpoint's path or URL as it works from here: the run's events name those in it
    relative to it."""
    if "://" in path:
        return path
    return str(run_dir / path)
