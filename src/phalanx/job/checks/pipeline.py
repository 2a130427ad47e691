"""Keys of pipeline parallelism: those that only it reads, and those that it cannot do with."""

from __future__ import annotations

from phalanx.job.checks.check import check, finding
from phalanx.job.findings import Finding
from phalanx.job.schema import Job

KEYS = ("schedule", "schedule_file", "stages_per_rank", "stage_blocks", "first_stage", "last_stage")


@check("parallel.pp", *(f"parallel.{key}" for key in KEYS))
def pipeline_keys_are_read(job: Job) -> list[Finding]:
    if (job.parallel.pp or 1) > 1:
        return []
    what, fix = "is for pipeline parallelism, and parallel.pp is 1", "set parallel.pp, or remove it"
    return [finding(f"parallel.{key}", what, fix) for key in KEYS if getattr(job.parallel, key)]


@check(
    "parallel.schedule",
    "parallel.schedule_file",
    "parallel.stages_per_rank",
    asked_by=("parallel.schedule_file",),
)
def one_schedule(job: Job) -> list[Finding]:
    if job.parallel.schedule_file is None:
        return []
    return [
        finding(
            f"parallel.{key}", "is said by parallel.schedule_file already", "remove one of them"
        )
        for key in ("schedule", "stages_per_rank")
        if getattr(job.parallel, key) is not None
    ]


@check(
    "parallel.pp",
    "parallel.compress",
    "parallel.accumulate",
    "parallel.offload",
    "train.offload_activations",
    asked_by=("parallel.pp",),
)
def pipelines_can_do_it(job: Job) -> list[Finding]:
    if (job.parallel.pp or 1) == 1:
        return []
    of, wrong = job.parallel, "not with parallel.pp: "
    found = []
    if of.compress != "none":
        what = f"{wrong}gradients of stages that share a weight would travel with different errors"
        found.append(finding("parallel.compress", what, 'set it to "none", or parallel.pp=1'))
    if of.accumulate == "sharded":
        what = f"{wrong}gradients stay whole until the last microbatch, in any schedule"
        found.append(
            finding("parallel.accumulate", what, 'set it to "unsharded", or parallel.pp=1')
        )
    if of.offload == "parameters":
        what = f"{wrong}the parameters of a stage are gathered once for the whole step"
        found.append(
            finding("parallel.offload", what, 'set it to "optimizer" or "none", or parallel.pp=1')
        )
    if job.train.offload_activations:
        what = (
            f"{wrong}microbatches are in flight together, and what they keep does not come back in"
            " one order"
        )
        found.append(
            finding(
                "train.offload_activations", what, "set train.recompute instead, or parallel.pp=1"
            )
        )
    return found


CHECKS = (pipeline_keys_are_read, one_schedule, pipelines_can_do_it)
