"""Keys of expert parallelism: over which ranks experts can be spread, and what does not go with
it."""

from __future__ import annotations

import math

from phalanx.core.registry import is_foreign
from phalanx.job.checks.check import declare_check, make_finding
from phalanx.job.checks.model import find_model_shape
from phalanx.job.costs import ModelCosts
from phalanx.job.findings import Finding
from phalanx.job.nearest import format_nearest_values, list_divisors
from phalanx.job.schema import Job

EXPERT_REDUCTION_REASON = "experts are reduced over other ranks than the rest"
FOREIGN_MODEL_REFUSAL = (
    "spreads the experts of phalanx's own models; one that you bring keeps its experts whole",
    "remove it",
)
EXPERT_MODEL_KEYS = ("model.kind", "model.preset", "model.num_experts")


@declare_check("parallel.ep", *EXPERT_MODEL_KEYS, asked_by=("parallel.ep",))
def check_experts_can_be_spread(job: Job) -> list[Finding]:
    ep = job.parallel.degrees.ep
    if ep == 1:
        return []
    if job.model.is_foreign:
        return [
            make_finding(
                "parallel.ep", f"ep {ep} {FOREIGN_MODEL_REFUSAL[0]}", FOREIGN_MODEL_REFUSAL[1]
            )
        ]
    shape = find_model_shape(job)
    if shape is None:
        return []
    # The ranks matter for the fix alone; whether ep divides them is another check's question.
    num_ranks, _ = find_ranks_for_experts(job) or (None, "")
    wrong = find_expert_parallel_problem(ep, shape, num_ranks)
    if wrong is None:
        return []
    return [make_finding("parallel.ep", *wrong)]


def find_expert_parallel_problem(
    ep: int, shape: ModelCosts, num_ranks: int | None = None
) -> tuple[str, str] | None:
    """(problem, fix) for `ep` ranks and a model's experts; None if they go together.

    `num_ranks`: those that experts can be spread over, where that is known.
    """
    experts = shape.experts
    if experts is None and is_foreign(shape.kind):
        return f"ep {ep} {FOREIGN_MODEL_REFUSAL[0]}", FOREIGN_MODEL_REFUSAL[1]
    if experts is None:
        return (
            f"ep {ep} spreads experts over ranks, and the model has none",
            "set model.num_experts, or remove parallel.ep",
        )
    if experts.count % ep:
        # gcd(n, 0) is n: where the ranks are open, the experts alone decide what is near.
        problem = f"ep {ep} does not divide the {experts.count} experts"
        degrees = list_divisors(math.gcd(experts.count, num_ranks or 0))
        return problem, f"nearest: {format_nearest_values(ep, degrees)}"
    return None


@declare_check(
    "parallel.ep",
    "parallel.ranks",
    "parallel.dp_replicate",
    "parallel.dp_shard",
    "parallel.pp",
    "parallel.cp",
    "parallel.tp",
    asked_by=("parallel.ep",),
)
def check_experts_divide_ranks(job: Job) -> list[Finding]:
    """A finding if ep does not divide the ranks that experts can be spread over. The model
    matters for the fix alone."""
    ep, ranks = job.parallel.degrees.ep, find_ranks_for_experts(job)
    # One finding for one ep: what the model refuses is told by `check_experts_can_be_spread`.
    if ep == 1 or ranks is None or ranks[0] % ep == 0 or check_experts_can_be_spread.run(job):
        return []
    return [
        make_finding("parallel.ep", *explain_undivided_ranks(job, find_model_shape(job), *ranks))
    ]


def explain_undivided_ranks(
    job: Job, shape: ModelCosts | None, size: int, ranks_in_words: str
) -> tuple[str, str]:
    """(problem, fix) for an ep that does not divide the `size` ranks, which messages call
    `ranks_in_words`."""
    ep = job.parallel.degrees.ep
    num_experts = 0  # gcd(n, 0) is n: without experts, the ranks alone decide
    if shape is not None and shape.experts is not None:
        num_experts = shape.experts.count
    legal = list_divisors(math.gcd(size, num_experts))
    return (
        f"ep {ep} does not divide {ranks_in_words}",
        f"nearest: {format_nearest_values(ep, legal)}, or {_suggest_more_ranks(job, size)}",
    )


def _suggest_more_ranks(job: Job, size: int) -> str:
    """The least number of ranks above `size` that ep divides, as a fix."""
    of, degrees = job.parallel, job.parallel.degrees
    step = degrees.num_expert_shards
    # ep folds over dp_shard x cp, so dp_shard has to be a multiple of ep / gcd(ep, cp).
    more = size // degrees.cp // step * step + step
    ranks = more * degrees.dp_replicate * degrees.model_parallel_size
    if of.dp_shard is None:
        return f"parallel.ranks={ranks}"
    if of.ranks is not None and of.ranks % ranks:
        return f"parallel.dp_shard={more} with parallel.ranks={ranks}"
    return f"parallel.dp_shard={more}"


@declare_check(
    "parallel.ep",
    "parallel.zero_stage",
    "parallel.compress",
    "train.compile",
    asked_by=("parallel.ep",),
)
def check_experts_have_no_conflicts(job: Job) -> list[Finding]:
    if job.parallel.degrees.ep == 1:
        return []
    findings = []
    if job.parallel.zero_stage == 1:
        findings.append(
            make_finding(
                "parallel.zero_stage",
                f"1 is not for parallel.ep: {EXPERT_REDUCTION_REASON}",
                "set it to 2 or 3",
            )
        )
    if job.parallel.compress != "none":
        problem = (
            f"not with parallel.ep: {EXPERT_REDUCTION_REASON}, and a hook is for one set of ranks"
        )
        findings.append(
            make_finding("parallel.compress", problem, 'set it to "none", or parallel.ep=1')
        )
    if job.train.compile:
        problem = (
            "not with parallel.ep: how many rows travel to other ranks differs from step to step"
        )
        findings.append(make_finding("train.compile", problem, "set it to false, or parallel.ep=1"))
    return findings


def find_ranks_for_experts(job: Job, num_ranks: int | None = None) -> tuple[int, str] | None:
    """(number of ranks that the experts can be spread over at most, these ranks in words).

    `num_ranks`: how many there are in all, where it is known; None where the job does not decide
    it.
    """
    of, cp = job.parallel, job.parallel.degrees.cp
    model_ranks = job.parallel.degrees.model_parallel_size
    # The words follow the keys that decide: they are what the user can change.
    over = "dp_shard {}"
    if cp > 1:
        over += f" x cp {cp}"
    if of.dp_shard is not None:
        return of.dp_shard * cp, over.format(of.dp_shard)
    ranks = num_ranks or of.ranks
    if ranks is None or ranks % model_ranks:
        return None
    shares = ranks // model_ranks
    if of.dp_replicate is None:
        holders = "the 1 rank that holds"
        if shares * cp > 1:
            holders = f"the {shares * cp} ranks that hold"
        return shares * cp, f"{holders} the same part of the model"
    if shares % of.dp_replicate:
        return None
    shards = shares // of.dp_replicate
    return (
        shards * cp,
        f"{over.format(shards)}, what dp_replicate {of.dp_replicate} leaves of the ranks",
    )


CHECKS = (check_experts_can_be_spread, check_experts_divide_ranks, check_experts_have_no_conflicts)
