"""The choice of a layout: what the job fixes, else the simplest that fits; a refusal says what
would.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phalanx.core.errors import LayoutError
from phalanx.core.units import format_bytes
from phalanx.job.schema import Job
from phalanx.plan.data_parallel import DataParallel
from phalanx.plan.experts import proposed_degree
from phalanx.plan.memory import Workload
from phalanx.plan.plan import Candidate
from phalanx.plan.recompute import proposed
from phalanx.plan.weigh import Weighing


def choose(
    job: Job, candidates: Sequence[Candidate], weighing: Weighing
) -> tuple[Candidate, list[str]]:
    """What the job fixes, else the first that fits in the order one, ddp, zero1, zero2, zero3; and
    the reasons.

    Raises LayoutError where nothing does that the job allows.
    """
    allowed, reasons = _allowed(job, candidates)
    for candidate in allowed:
        if candidate.fits:
            if len(allowed) > 1:
                reasons.append(
                    f"{candidate.name}: the simplest that fits"
                    f" ({format_bytes(candidate.total_bytes)} of the"
                    f" {format_bytes(weighing.capacity_bytes)} per rank that a plan may fill)"
                )
            return candidate, reasons
    raise _refusal(job, allowed, candidates, weighing)


def _allowed(job: Job, candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[str]]:
    """The candidates that the job leaves, and what is to be said where it leaves one."""
    options = DataParallel.of(job.parallel)
    shard, replicate, stage = (
        job.parallel.dp_shard,
        job.parallel.dp_replicate,
        job.parallel.zero_stage,
    )
    runnable = [c for c in candidates if options.can_run(c.zero_stage)]
    if not runnable:
        options.require_runnable(candidates[0].name, candidates[0].zero_stage)
    shares = candidates[0].layout.data_parallel_size
    if candidates[0].layout.cp > 1 and stage:  # which cp alone has ranks enough for
        only = next(c for c in candidates if c.zero_stage == stage)
        why = f"{only.name} over {only.layout}, as the job says"
    elif shares > 1 and (shard or stage or (replicate is not None and replicate < shares)):
        is_sharded = (shard or shares // (replicate or 1)) > 1
        only = next(c for c in candidates if c.zero_stage == ((stage or 3) if is_sharded else 0))
        why = f"{only.name} over {only.layout}, as the job says"
    elif shares > 1 and (replicate == shares or job.parallel.compress != "none"):
        only = next(c for c in candidates if c.zero_stage == 0)
        why = "ddp, as the job says" if replicate == shares else "ddp: parallel.compress is for it"
    else:
        return runnable, []
    options.require_runnable(only.name, only.zero_stage)
    return [only], [why]


def _refusal(
    job: Job, allowed: Sequence[Candidate], candidates: Sequence[Candidate], weighing: Weighing
) -> LayoutError:
    """Nothing fits that is allowed: what is missing, for what, and what would fit."""
    least = min(allowed, key=lambda c: c.total_bytes)
    largest = max(least.predicted_bytes, key=lambda k: least.predicted_bytes[k])
    others = [c for c in candidates if c.fits]
    if weighing.capacity_bytes == 0:
        fix = "use fewer ranks: interpreter and torch alone fill what each of them has"
    elif others:
        fix = f"{others[0].name} would fit"
    else:
        fix = _recompute_that_fits(least, weighing) or proposed_degree(job, weighing, least)
        fix = fix or _how_to_shrink(largest) or _more_ranks(weighing)
    return LayoutError(
        f"{least.name} needs {format_bytes(least.total_bytes)} per rank and"
        f" {format_bytes(weighing.capacity_bytes)} are there",
        why=f"the largest part is {largest}, {format_bytes(least.predicted_bytes[largest])}",
        fix=fix,
    )


def _recompute_that_fits(candidate: Candidate, weighing: Weighing) -> str:
    """The mode of recompute that would make a candidate fit, or ""."""

    def fits(work: Workload) -> bool:
        return weighing.has_room_for(
            replace(weighing, work=work).memory(
                candidate.zero_stage, candidate.layout.reduced.dp_shard
            )
        )

    return proposed(weighing.shape, weighing.work, fits, weighing.activations)


def _more_ranks(weighing: Weighing) -> str:
    """Over how many ranks, doubling, zero3 fits if each has as much memory as these have, or
    what stays too large."""
    memory: dict[str, int] = {}
    for doubled in range(1, 16):
        more = weighing.num_ranks * 2**doubled
        memory = replace(weighing, num_ranks=more).memory(
            3, more // weighing.model_parallel_size * weighing.work.cp
        )
        if weighing.has_room_for(memory):
            return (
                f"use more ranks ({more:,} with as much memory each: zero3 fits there) or a smaller"
                " model"
            )
    largest = max(memory, key=lambda part: memory[part])
    remedy = _how_to_shrink(largest) or "use a smaller model or ranks with more memory"
    return (
        f"{remedy}: more ranks do not help, over {more:,} of them {largest} alone take"
        f" {format_bytes(memory[largest])}"
    )


def _how_to_shrink(largest: str) -> str:
    return {
        "activations": "use a smaller train.micro_batch_size or train.recompute=full",
        "loss": "use a smaller train.loss_chunk_tokens",
        "staging": "use checkpoint.asynchronous=false",
    }.get(largest, "")
