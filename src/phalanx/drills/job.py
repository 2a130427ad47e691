"""The job of a drill: the user's, or the default one made small, cut to a few steps with a few
saves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.drills.trials import DrillShape
from phalanx.job.copies import apply_job_keys, list_short_copy_keys
from phalanx.job.learning_rate import count_decay_steps
from phalanx.job.load import load_job
from phalanx.job.schema import Job
from phalanx.job.toml import format_toml_value
from phalanx.plan.layout import Layout
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
    small = () if job_file else SMALL_JOB
    job = load_job(job_file, [*small, *overrides])
    short = _list_short_job_overrides(job, num_steps, save_every_steps)
    arguments = [*small, *short, *keys, *overrides]
    file = (job_file,) if job_file else ()
    return DrilledJob(load_job(job_file, arguments), (*file, *arguments))


def _list_short_job_overrides(job: Job, num_steps: int, save_every_steps: int | None) -> list[str]:
    """Overrides that make a job one of `num_steps` steps, which saves on the way."""
    short = list_short_copy_keys(job, num_steps)
    num_free_steps = num_steps - count_decay_steps(apply_job_keys(job, short))
    drilled = {
        # A tenth, however long the job's is: of forty steps and of a soak's many.
        "optim.warmup_steps": min(max(num_steps // 10, 1), num_free_steps),
        "checkpoint.every_steps": save_every_steps or max(num_steps // SAVES_PER_RUN, 1),
        "checkpoint.at_end": True,
    }
    return [f"{key}={format_toml_value(value)}" for key, value in (short | drilled).items()]


def measure_job(job: Job) -> DrillShape:
    """Ranks, steps, saves and copies of weights of a job, as its plan has them. Raises
    LayoutError."""
    plan = plan_job(job, checks_initial=False).plan
    layout = plan.layout
    return DrillShape(
        layout.world_size,
        job.train.steps,
        job.checkpoint.every_steps or max(job.train.steps // SAVES_PER_RUN, 1),
        num_replicas=count_replicas_of_weights(layout, plan.parallel.zero_stage),
        checks_memory=job.resilience.check_memory_every == 1,
        has_one_group=has_one_group(layout),
        layout=str(layout),
    )


def count_replicas_of_weights(layout: Layout, zero_stage: int) -> int:
    """Ranks that update the same block of a weight, where nothing but the layout cuts it: of the
    block with fewest."""
    if zero_stage:
        # Also of ZeRO-1: what one rank makes of its part, the others copy.
        return layout.dp_replicate
    # Of experts, each of the ranks along ep has others.
    return layout.dp_replicate * layout.gradient_reduction_layout.dp_shard // layout.ep


def has_one_group(layout: Layout) -> bool:
    """True if all collectives of training are of all ranks: one axis has all of them, and it is not
    that of pipelines, whose ranks send messages."""
    degrees = (layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp)
    return layout.world_size in degrees and layout.ep in (1, layout.world_size)


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
