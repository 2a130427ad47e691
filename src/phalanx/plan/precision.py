"""The type of numbers: what precision.compute "auto" means on a cluster (bf16 on GPUs that multiply
it, else fp32), and what fp8 needs.

Torch-free.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.core.errors import EnvironmentProblem, LayoutError
from phalanx.job.schema import Job
from phalanx.plan.cluster import Cluster, detect_cluster
from phalanx.plan.plan import Plan
from phalanx.plan.workload import Workload

MIN_BF16_CAPABILITY = (8, 0)  # the first GPUs whose tensor cores multiply bf16: A100
MIN_FP16_CAPABILITY = (7, 0)  # the first with tensor cores, which take fp16 alone: V100


def resolve_precision(job: Job, cluster: Cluster) -> tuple[Job, str]:
    """`job` with the type of numbers that "auto" means on `cluster`, and why it is this one.

    Nothing is said ("") of a job that names the type itself, and on CPUs, which compute in fp32
    unless told otherwise.
    """
    if job.precision.compute != "auto":
        return job, ""
    compute, why = _choose_default_precision(cluster)
    return replace_precision(job, compute), why


def detect_precision(job: Job) -> str:
    """The type of numbers that `job` trains in on this machine; fp32 where the machine does not
    say what it has."""
    try:
        return resolve_precision(job, detect_cluster(job.cluster.device))[0].precision.compute
    # `make_plan` refuses such a machine, and says why.
    except EnvironmentProblem:
        return "fp32"


def replace_precision(job: Job, compute: str) -> Job:
    """`job` with `compute` as its precision.compute."""
    return job.model_copy(
        update={"precision": job.precision.model_copy(update={"compute": compute})}
    )


def keep_precision_of_run(plan: Plan, before: Plan | None, cluster: Cluster) -> Plan:
    """`plan` of a run that goes on, with what is to be said of its type of numbers; `before` is the
    run's last plan.

    A run keeps the type that "auto" meant where it began. Where "auto" would mean another one here,
    a reason says so.
    """
    if before is None or not before.precision_is_auto or before.precision != plan.precision:
        return plan  # the job named it from the start, or names another one now
    plan = replace(
        plan,
        precision_is_auto=True,
        value_reasons=plan.value_reasons | {"precision.compute": "as the run began"},
    )
    compute, _ = _choose_default_precision(cluster)
    if compute == plan.precision:
        return plan
    reason = (
        f"{plan.precision}, as the run began: precision.compute=auto is {compute} on this machine,"
        f" and a run keeps what it has; --resume with precision.compute={compute} changes it"
    )
    return replace(plan, reasons=(*plan.reasons, reason))


def _choose_default_precision(cluster: Cluster) -> tuple[str, str]:
    """(precision.compute, why)."""
    if cluster.device != "cuda":
        return "fp32", ""
    if cluster.capability is None:
        why = (
            "nobody says which compute capability these GPUs have; from 8.0 on choose"
            " precision.compute=bf16"
        )
        return "fp32", f"fp32: {why}"
    gpus = f"GPUs of compute capability {'.'.join(map(str, cluster.capability))}"
    if cluster.capability >= MIN_BF16_CAPABILITY:
        why = (
            "weights, optimizer and the reduction of gradients stay fp32; precision.compute=fp32"
            " turns it off"
        )
        return "bf16", f"bf16: {gpus} multiply it many times as fast as fp32; {why}"
    more = ""
    if cluster.capability >= MIN_FP16_CAPABILITY:
        more = "; precision.compute=fp16 uses their tensor cores"
    return "fp32", f"fp32: {gpus} have no bf16 to multiply with{more}"


def require_gpus_multiply(job: Job, cluster: Cluster) -> None:
    """Raises LayoutError for a type of numbers that the GPUs of `cluster` have no products of."""
    compute, capability = job.precision.compute, cluster.capability
    least, fix = {
        "bf16": (MIN_BF16_CAPABILITY, "set precision.compute=fp16 or fp32"),
        "fp8": (MIN_FP8_CAPABILITY, "set precision.compute=auto"),
    }.get(compute, ((0, 0), ""))
    if cluster.device != "cuda" or capability is None or capability >= least:
        return
    # A run may go on in bf16 where torch has to emulate it; nobody plans for that.
    if compute == "bf16" and not cluster.is_described:
        return
    needed, present = (".".join(map(str, version)) for version in (least, capability))
    raise LayoutError(
        f"precision.compute={compute} needs GPUs of compute capability {needed}, and"
        f" {cluster.name or 'these'} have {present}",
        fix=fix,
    )


# The fp8 kernels take widths of matrices and tokens of a microbatch in multiples of this.
FP8_WIDTH_MULTIPLE = 16
MIN_FP8_CAPABILITY = (8, 9)  # the first GPUs that multiply fp8: Ada, and Hopper (9.0)
FP8_FIX = "set precision.compute=bf16"


def require_fp8_is_possible(work: Workload, device: str, *, tokens_are_known: bool) -> None:
    """Raises LayoutError for a plan that asks for fp8 and cannot have it.

    Of a user's own module tokens are unknown.
    """
    if work.precision != "fp8":
        return
    if device != "cuda":
        raise LayoutError(
            f"precision.compute=fp8 needs GPUs, and this plan is for {device.upper()}s",
            why="no other multiplies fp8",
            fix=FP8_FIX,
        )  # fmt: skip
    if tokens_are_known and work.tokens % FP8_WIDTH_MULTIPLE:
        raise LayoutError(
            f"precision.compute=fp8 multiplies {FP8_WIDTH_MULTIPLE} tokens at a time, and a rank's"
            f" microbatch has {work.tokens}",
            fix=(
                "choose train.micro_batch_size and data.seq_len so that their product is a"
                f" multiple of {FP8_WIDTH_MULTIPLE}"
            ),
        )
