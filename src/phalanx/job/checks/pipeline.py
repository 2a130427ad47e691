"""Keys of pipeline parallelism: those that only it reads, and those that it cannot do with."""

from __future__ import annotations

from phalanx.job.checks.check import declare_check, make_finding
from phalanx.job.findings import Finding
from phalanx.job.schema import Job

PIPELINE_ONLY_KEYS = (
    "schedule",
    "schedule_file",
    "stages_per_rank",
    "stage_blocks",
    "first_stage",
    "last_stage",
)


@declare_check("parallel.pp", *(f"parallel.{key}" for key in PIPELINE_ONLY_KEYS))
def check_pipeline_keys_are_read(job: Job) -> list[Finding]:
    if job.parallel.degrees.pp > 1:
        return []
    problem, fix = (
        "is for pipeline parallelism, and parallel.pp is 1",
        "set parallel.pp, or remove it",
    )
    return [
        make_finding(f"parallel.{key}", problem, fix)
        for key in PIPELINE_ONLY_KEYS
        if getattr(job.parallel, key)
    ]


@declare_check(
    "parallel.schedule",
    "parallel.schedule_file",
    "parallel.stages_per_rank",
    asked_by=("parallel.schedule_file",),
)
def check_schedule_is_given_once(job: Job) -> list[Finding]:
    if job.parallel.schedule_file is None:
        return []
    return [
        make_finding(
            f"parallel.{key}", "is said by parallel.schedule_file already", "remove one of them"
        )
        for key in ("schedule", "stages_per_rank")
        if getattr(job.parallel, key) is not None
    ]


@declare_check(
    "parallel.pp",
    "parallel.compress",
    "parallel.accumulate",
    "parallel.offload",
    "train.offload_activations",
    asked_by=("parallel.pp",),
)
def check_pipeline_has_no_conflicts(job: Job) -> list[Finding]:
    if job.parallel.degrees.pp == 1:
        return []
    of, wrong = job.parallel, "not with parallel.pp: "
    findings = []
    if of.compress != "none":
        problem = (
            f"{wrong}gradients of stages that share a weight would travel with different errors"
        )
        findings.append(
            make_finding("parallel.compress", problem, 'set it to "none", or parallel.pp=1')
        )
    if of.accumulate == "sharded":
        problem = f"{wrong}gradients stay whole until the last microbatch, in any schedule"
        findings.append(
            make_finding("parallel.accumulate", problem, 'set it to "unsharded", or parallel.pp=1')
        )
    if of.offload == "parameters":
        problem = f"{wrong}the parameters of a stage are gathered once for the whole step"
        findings.append(
            make_finding(
                "parallel.offload", problem, 'set it to "optimizer" or "none", or parallel.pp=1'
            )
        )
    if job.train.offload_activations:
        problem = (
            f"{wrong}microbatches are in flight together, and what they keep does not come back in"
            " one order"
        )
        findings.append(
            make_finding(
                "train.offload_activations",
                problem,
                "set train.recompute instead, or parallel.pp=1",
            )
        )
    return findings


CHECKS = (
    check_pipeline_keys_are_read,
    check_schedule_is_given_once,
    check_pipeline_has_no_conflicts,
)
