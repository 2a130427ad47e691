"""The job of a drill: the user's, or the default one made small, cut to a few steps with a few
saves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.drills.trials import DrillShape
from phalanx.job.load import load_job
from phalanx.job.schema import Job
from phalanx.run.plan_job import plan_job

SMALL_JOB = (
    "model.num_layers=2",
    "model.dim=64",
    "model.num_heads=2",
    "data.seq_len=64",
    "train.global_batch_size=8",
    "parallel.ranks=2",
)
"""Of the drill that no job is given to: steps of a few hundredths of a second."""
SAVES_PER_RUN = 4


@dataclass(frozen=True)
class DrilledJob:
    """A job, and the arguments of `phalanx train` that say it."""

    job: Job
    arguments: tuple[str, ...]


def load_drilled_job(
    job_file: str | None,
    overrides: Sequence[str],
    *,
    num_steps: int,
    save_every_steps: int | None = None,
    keys: Sequence[str] = (),
) -> DrilledJob:
    """The job that is drilled. `overrides` come last, and win, also over `keys`. Raises JobError.

    `save_every_steps`: None for four saves in the run.
    """
    save_every = save_every_steps or max(num_steps // SAVES_PER_RUN, 1)
    cut = [
        f"train.steps={num_steps}",
        f"optim.warmup_steps={max(num_steps // 10, 1)}",
        f"checkpoint.every_steps={save_every}",
        "checkpoint.at_end=true",
        "eval.tokens=0",
        "train.sample_tokens=0",
        "observe.sinks=[]",
        "resilience.inject=[]",
    ]
    small = () if job_file else SMALL_JOB
    arguments = [*small, *cut, *keys, *overrides]
    file = (job_file,) if job_file else ()
    return DrilledJob(load_job(job_file, arguments), (*file, *arguments))


def measure_job(job: Job) -> DrillShape:
    """Ranks, steps and saves of a job, as its plan has them. Raises LayoutError."""
    plan = plan_job(job, checks_initial=False).plan
    return DrillShape(
        plan.layout.world_size,
        job.train.steps,
        job.checkpoint.every_steps or max(job.train.steps // SAVES_PER_RUN, 1),
    )


def format_inject(texts: Sequence[str]) -> str:
    """The override that injects faults."""
    return f"resilience.inject={json.dumps(list(texts))}"


def list_restart_budget_keys(num_faults: int) -> tuple[str, ...]:
    """Keys of a job that survives so many faults: each may take two restarts (two ranks that die
    one after the other) and one return to an earlier checkpoint."""
    return (
        f"resilience.max_restarts={2 * num_faults + 3}",
        f"resilience.max_rollbacks={num_faults + 3}",
    )
