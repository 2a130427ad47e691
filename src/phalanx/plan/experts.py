"""What expert parallelism needs of a job and its model, what it takes, and what it would save.

Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from phalanx.core.errors import LayoutError
from phalanx.core.units import format_bytes
from phalanx.job import counts
from phalanx.job.expert_checks import WHY, experts_can_do_it, misfit, not_divided, ranks_for_experts
from phalanx.job.nearby import divisors
from phalanx.job.schema import Job
from phalanx.job.shape import ModelShape
from phalanx.plan.memory import Workload, of_one_rank
from phalanx.plan.plan import Candidate
from phalanx.plan.weigh import Weighing

ROW_EXCHANGES = 4  # of a block and microbatch: to the experts and back, and so the gradients
MOST_PROPOSED = 8  # ranks of one node: rows of every token travel in every block
WORTH_SHARE = 0.05  # of a rank's memory: what spreading experts must save to be worth a line


def expert_parallel_degree(job: Job, shape: ModelShape, num_ranks: int) -> int:
    """The degree of ep.

    Raises LayoutError for what it cannot do, naming the nearest that it can.
    """
    ep = job.parallel.ep or 1
    if ep == 1:
        return 1
    size, called = ranks_for_experts(job, num_ranks) or (num_ranks, f"the {num_ranks} ranks")
    wrong = misfit(ep, shape, size)
    if wrong is not None:
        raise LayoutError(f"parallel.{wrong[0]}", fix=wrong[1])
    for found in experts_can_do_it.run(job):
        raise LayoutError(f"{'.'.join(map(str, found.path))}: {found.what}", fix=found.fix)
    if size % ep:
        what, fix = not_divided(job, shape, size, called)
        raise LayoutError(f"parallel.{what}", fix=fix)
    return ep


def sent_bytes_of_step(shape: ModelShape, work: Workload) -> float:
    """What a rank sends to the others of ep in a step without recomputation, where all experts get
    equally many rows.

    `shape`: of one rank of tp.
    """
    rows = work.tokens * shape.experts_per_token * (work.ep - 1) / work.ep
    num_exchanges = ROW_EXCHANGES * shape.num_expert_layers * work.num_microbatches
    return num_exchanges * rows * shape.dim * work.compute_bytes


def expert_reasons(job: Job, weighing: Weighing, chosen: Candidate) -> list[str]:
    """Lines of a plan."""
    shape, work = weighing.shape, weighing.work
    if not shape.num_expert_layers or weighing.num_ranks == 1:
        return []
    if work.ep == 1:
        return [line for line in (_if_spread(job, weighing, chosen),) if line]
    here = of_one_rank(shape, work.tp, work.rules)
    rest = chosen.layout.reduced.dp_shard // work.ep
    lies = (
        "whole"
        if chosen.zero_stage == 0
        else f"split over {rest} ranks"
        if rest > 1
        else "not split further"
    )
    sent = format_bytes(sent_bytes_of_step(here, work))
    return [
        (
            f"ep: each of {work.ep} ranks has {shape.num_experts // work.ep} of a block's"
            f" {shape.num_experts} experts, {lies}; rows of tokens travel to them and back, {sent}"
            " per rank and step where experts get equally many"
        ),
        f"zero1 is left out: with ep, {WHY}",
    ]


def _if_spread(job: Job, weighing: Weighing, chosen: Candidate) -> str:
    """What parallel.ep would save, where it can be set and is worth a line."""
    degree = max(
        (ep for ep in degrees_for(job, weighing, chosen) if ep <= MOST_PROPOSED), default=1
    )
    if degree == 1:
        return ""
    work = replace(weighing.work, ep=degree)
    shards = chosen.layout.reduced.dp_shard
    saved = chosen.total_bytes - sum(
        replace(weighing, work=work).memory(chosen.zero_stage, shards).values()
    )
    if saved < WORTH_SHARE * chosen.total_bytes:
        return ""
    whole = counts.experts_params(of_one_rank(weighing.shape, work.tp, work.rules))
    what = "holds" if chosen.zero_stage < 2 else "gathers"
    sent = format_bytes(sent_bytes_of_step(of_one_rank(weighing.shape, work.tp, work.rules), work))
    return (
        f"experts: each rank {what} all {weighing.shape.num_experts} of a block,"
        f" {format_bytes(whole * 4)} in fp32; parallel.ep={degree} would save {format_bytes(saved)}"
        f" per rank and send {sent} per rank and step"
    )


def degrees_for(job: Job, weighing: Weighing, candidate: Candidate) -> Iterator[int]:
    """The degrees of ep above 1 that a candidate could have, in ascending order."""
    shape = weighing.shape
    if weighing.work.ep > 1 or not shape.num_expert_layers or candidate.zero_stage == 1:
        return
    if experts_can_do_it.run(
        job.model_copy(update={"parallel": job.parallel.model_copy(update={"ep": 2})})
    ):
        return
    ranks = ranks_for_experts(job, weighing.num_ranks)
    if ranks is not None:
        yield from (
            degree for degree in divisors(math.gcd(ranks[0], shape.num_experts)) if degree > 1
        )


def proposed_degree(job: Job, weighing: Weighing, candidate: Candidate) -> str:
    """The smallest ep that would make a candidate fit, as a fix; "" if none does."""
    for degree in degrees_for(job, weighing, candidate):
        spread = replace(weighing, work=replace(weighing.work, ep=degree))
        if weighing.has_room_for(
            spread.memory(candidate.zero_stage, candidate.layout.reduced.dp_shard)
        ):
            return (
                f"set parallel.ep={degree}: each rank then has"
                f" {weighing.shape.num_experts // degree} of the experts"
            )
    return ""
