"""What a job gives up digits for, compressed gradients and fp16: refusals, numbers and reasons
of the plan."""

from __future__ import annotations

from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.core.units import format_bytes
from phalanx.job.schema import Job
from phalanx.job.shape import ModelShape
from phalanx.plan.memory import keeps_error


def require_whole_copies(job: Job, ranks: int) -> None:
    """Raises LayoutError where gradients are to be compressed that DDP does not reduce."""
    parallel = job.parallel
    if parallel.compress != "none" and (parallel.tp or 1) > 1:
        raise LayoutError(
            f"parallel.compress={parallel.compress} is for ddp, and the job has tensor parallelism",
            why="ranks that hold a weight alike would have to keep the same error of it",
            fix="set parallel.tp=1, or parallel.compress=none",
        )
    sharded = (
        (parallel.dp_shard or 1) > 1
        or parallel.zero_stage
        or (parallel.dp_replicate or ranks) < ranks
    )
    if parallel.compress != "none" and sharded:
        raise LayoutError(
            f"parallel.compress={parallel.compress} is for ddp, and the job shards the model",
            why=(
                "FSDP scatters gradients in fp32; its reduction has no place for a hook that keeps"
                " an error"
            ),
            fix=f"set parallel.dp_replicate={ranks} alone, or parallel.compress=none",
        )


def lossy_choices(job: Job) -> dict[str, Any]:
    """Fields of a plan."""
    parallel, precision = job.parallel, job.precision
    found: dict[str, Any] = {
        "compress": parallel.compress,
        "compress_rank": parallel.compress_rank,
        "compress_fraction": parallel.compress_fraction,
    }
    if precision.compute != "fp16":
        return found
    if precision.loss_scale == "dynamic":
        growth = precision.loss_scale_growth_steps
        return found | {
            "loss_scale": precision.loss_scale_initial,
            "loss_scale_growth_steps": growth,
        }
    return found | {"loss_scale": precision.loss_scale}


def lossy_reasons(job: Job, shape: ModelShape, ranks: int) -> list[str]:
    reasons = []
    compress = job.parallel.compress
    if compress != "none" and ranks > 1:
        line = f"gradients travel as {_in_words(job)}: not what one process computes"
        if keeps_error(compress):
            size = format_bytes(4 * shape.num_params)
            line += (
                f"; what is not sent is added to the next step's, {size} more per rank and in every"
                " checkpoint"
            )
        reasons.append(line)
    if job.precision.compute == "fp16":
        scale = job.precision.loss_scale
        how = (
            f"begins at {job.precision.loss_scale_initial:g} and adapts"
            if scale == "dynamic"
            else f"is {scale:g}"
        )
        reasons.append(
            f"fp16 ends at 65504, so the loss is scaled: the scale {how}; bf16 needs none"
        )
    return reasons


def _in_words(job: Job) -> str:
    parallel = job.parallel
    return {
        "int8": "int8 with a scale for each 256",
        "topk": f"their largest {parallel.compress_fraction:.3g} of elements",
        "powersgd": f"products of matrices of rank {parallel.compress_rank}",
    }.get(parallel.compress, parallel.compress)
