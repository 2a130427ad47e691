"""Keys of expert parallelism: over which ranks experts can be spread, and what does not go with
it."""

from __future__ import annotations

import math

from phalanx.job.checks.check import check, finding
from phalanx.job.checks.model import shape_or_none
from phalanx.job.findings import Finding
from phalanx.job.nearest import divisors, nearest
from phalanx.job.schema import Job
from phalanx.job.shape import ModelShape

WHY = "experts are reduced over other ranks than the rest"
FOREIGN = (
    "spreads the experts of phalanx's own models; one that you bring keeps its experts whole",
    "remove it",
)
MODEL = ("model.kind", "model.preset", "model.num_experts")


@check("parallel.ep", *MODEL, asked_by=("parallel.ep",))
def experts_can_be_spread(job: Job) -> list[Finding]:
    ep = job.parallel.ep or 1
    if ep == 1:
        return []
    if job.model.is_foreign:
        return [finding("parallel.ep", f"ep {ep} {FOREIGN[0]}", FOREIGN[1])]
    shape = shape_or_none(job)
    found = ranks_for_experts(job)
    wrong = None if shape is None else misfit(ep, shape, found[0] if found else None)
    return [finding("parallel.ep", *wrong)] if wrong is not None else []


def misfit(ep: int, shape: ModelShape, num_ranks: int | None = None) -> tuple[str, str] | None:
    """What is wrong with so many ranks for a model's experts, and what to do.

    `num_ranks`: those that experts can be spread over, where that is known.
    """
    if not shape.is_known:
        return f"ep {ep} {FOREIGN[0]}", FOREIGN[1]
    if not shape.num_experts:
        return (
            f"ep {ep} spreads experts over ranks, and the model has none",
            "set model.num_experts, or remove it",
        )
    if shape.num_experts % ep:
        what = f"ep {ep} does not divide the {shape.num_experts} experts"
        return (
            what,
            f"nearest: {nearest(ep, divisors(math.gcd(shape.num_experts, num_ranks or 0)))}",
        )
    return None


@check(
    "parallel.ep",
    "parallel.ranks",
    "parallel.dp_replicate",
    "parallel.dp_shard",
    "parallel.pp",
    "parallel.cp",
    "parallel.tp",
    asked_by=("parallel.ep",),
)
def experts_have_their_ranks(job: Job) -> list[Finding]:
    """Of the model only the fix is told: what is wrong is wrong with any."""
    ep, found = job.parallel.ep or 1, ranks_for_experts(job)
    if ep == 1 or found is None or found[0] % ep == 0 or experts_can_be_spread.run(job):
        return []
    return [finding("parallel.ep", *not_divided(job, shape_or_none(job), *found))]


def not_divided(job: Job, shape: ModelShape | None, size: int, called: str) -> tuple[str, str]:
    """What is wrong with an ep that does not divide the `size` ranks, `called` so, and what to
    do."""
    ep = job.parallel.ep or 1
    legal = divisors(
        math.gcd(size, shape.num_experts) if shape is not None and shape.num_experts else size
    )
    return (
        f"ep {ep} does not divide {called}",
        f"nearest: {nearest(ep, legal)}, or {_with_more_ranks(job, size)}",
    )


def _with_more_ranks(job: Job, size: int) -> str:
    """The least that ep divides, above what there is."""
    of, cp = job.parallel, job.parallel.cp or 1
    step = (of.ep or 1) // math.gcd(of.ep or 1, cp)
    more = size // cp // step * step + step
    ranks = more * (of.dp_replicate or 1) * of.model_parallel_size
    if of.dp_shard is None:
        return f"parallel.ranks={ranks}"
    return f"parallel.dp_shard={more}" + (
        f" with parallel.ranks={ranks}" if (of.ranks or 0) % ranks else ""
    )


@check(
    "parallel.ep",
    "parallel.zero_stage",
    "parallel.compress",
    "train.compile",
    asked_by=("parallel.ep",),
)
def experts_can_do_it(job: Job) -> list[Finding]:
    if (job.parallel.ep or 1) == 1:
        return []
    found = []
    if job.parallel.zero_stage == 1:
        found.append(
            finding("parallel.zero_stage", f"1 is not for parallel.ep: {WHY}", "set it to 2 or 3")
        )
    if job.parallel.compress != "none":
        what = f"not with parallel.ep: {WHY}, and a hook is for one set of ranks"
        found.append(finding("parallel.compress", what, 'set it to "none", or parallel.ep=1'))
    if job.train.compile:
        what = "not with parallel.ep: how many rows travel to other ranks differs from step to step"
        found.append(finding("train.compile", what, "set it to false, or parallel.ep=1"))
    return found


def ranks_for_experts(job: Job, num_ranks: int | None = None) -> tuple[int, str] | None:
    """How many ranks the experts can be spread over at most, and what to call them.

    `num_ranks`: how many there are in all, where it is known; None where the job does not decide
    it.
    """
    of, cp = job.parallel, job.parallel.cp or 1
    over = f"dp_shard {{}} x cp {cp}" if cp > 1 else "dp_shard {}"
    if of.dp_shard is not None:
        return of.dp_shard * cp, over.format(of.dp_shard)
    ranks = num_ranks or of.ranks
    if ranks is None or ranks % of.model_parallel_size:
        return None
    shares = ranks // of.model_parallel_size
    if of.dp_replicate is None:
        holders = (
            f"the {shares * cp} ranks that hold" if shares * cp > 1 else "the 1 rank that holds"
        )
        return shares * cp, f"{holders} the same part of the model"
    if shares % of.dp_replicate:
        return None
    left = shares // of.dp_replicate
    return (
        left * cp,
        f"{over.format(left)}, what dp_replicate {of.dp_replicate} leaves of the ranks",
    )


CHECKS = (experts_can_be_spread, experts_have_their_ranks, experts_can_do_it)
