"""The choice of a layout: the candidates, the memory each takes, the chosen one, and why the rest
is not chosen.

Torch-free. What the job fixes is chosen, else the simplest that fits; a refusal says what would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from phalanx.core.errors import LayoutError
from phalanx.core.units import format_bytes
from phalanx.job.checks.experts import experts_can_do_it, ranks_for_experts
from phalanx.job.nearest import divisors
from phalanx.job.schema import Job
from phalanx.job.shape import ModelShape
from phalanx.plan.communication import context_bytes, exchanged_bytes
from phalanx.plan.layout import DataParallel, Layout
from phalanx.plan.memory import activation_bytes, rank_memory, staging_bytes
from phalanx.plan.pipeline.memory import pipeline_memory, rank_activations, rank_staging
from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.plan import Candidate
from phalanx.plan.recompute import proposed
from phalanx.plan.workload import Workload, of_one_rank


@dataclass(frozen=True)
class Weighing:
    """What every layout is weighed by: a model, a rank's work, and ranks that may fill so much
    memory each."""

    shape: ModelShape
    work: Workload
    num_ranks: int
    capacity_bytes: int
    device: str
    pipeline: Pipeline | None = None

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same samples."""
        return self.work.cp * self._model_ranks

    @property
    def _model_ranks(self) -> int:
        return self.work.tp * (self.pipeline.num_ranks if self.pipeline is not None else 1)

    @property
    def num_shares(self) -> int:
        """Ranks that hold the same part of the model."""
        return self.num_ranks // self._model_ranks

    def staging_bytes(self) -> int:
        """Of the copy that a rank's saves are written from."""
        here = of_one_rank(self.shape, self.work.tp, self.work.rules)
        if self.pipeline is not None:
            return max(rank_staging(here, self.work, self.pipeline, self.num_shares))
        return staging_bytes(here, self.work, self.num_shares)

    def memory(self, zero_stage: int, shards: int) -> dict[str, int]:
        """Bytes of one rank by category: of a pipeline, of the one that needs most."""
        if self.pipeline is not None:
            return max(
                self.memory_of_ranks(zero_stage, shards), key=lambda memory: sum(memory.values())
            )
        memory = rank_memory(self.shape, self.work, zero_stage, shards, self.device, self.num_ranks)
        return self._with_exchanges(memory)

    def _with_exchanges(self, memory: dict[str, int]) -> dict[str, int]:
        here = of_one_rank(self.shape, self.work.tp, self.work.rules)
        under_way = round(context_bytes(here, self.work) + exchanged_bytes(here, self.work))
        return (
            memory | {"communication": memory["communication"] + under_way} if under_way else memory
        )

    def memory_of_ranks(self, zero_stage: int, shards: int) -> tuple[dict[str, int], ...]:
        """Of each rank of a pipeline."""
        assert self.pipeline is not None
        found = pipeline_memory(
            self.shape, self.work, self.pipeline, zero_stage, shards, self.device, self.num_shares
        )
        return tuple(self._with_exchanges(memory) for memory in found)

    def pipeline_of(self, candidate: Candidate) -> Pipeline | None:
        """With what its ranks need under a candidate."""
        if self.pipeline is None:
            return None
        memory = self.memory_of_ranks(candidate.zero_stage, candidate.layout.reduced.dp_shard)
        return replace(self.pipeline, rank_memory=memory)

    def activations(self, work: Workload) -> float:
        """Bytes of one rank, if it worked so: of a pipeline, of the one that has most."""
        shape = of_one_rank(self.shape, work.tp, work.rules)
        if self.pipeline is not None:
            return max(rank_activations(shape, work, self.pipeline))
        return activation_bytes(shape, work)

    def has_room_for(self, memory: dict[str, int]) -> bool:
        return sum(memory.values()) <= self.capacity_bytes

    def candidate(self, name: str, zero_stage: int, layout: Layout) -> Candidate:
        memory = self.memory(zero_stage, layout.reduced.dp_shard)
        return Candidate(name, zero_stage, layout, memory, self.has_room_for(memory))


def candidates_of(job: Job, weighing: Weighing) -> list[Candidate]:
    """From the simplest to the one that shards most."""
    tp, cp = weighing.work.tp, weighing.work.cp
    pp = weighing.model_parallel_size // (cp * tp)
    shares = weighing.num_ranks // (pp * cp * tp)
    if shares == 1 and cp == 1:
        name = "pp" if pp > 1 else "tp" if tp > 1 else "one"
        return [weighing.candidate(name, 0, Layout(pp=pp, tp=tp))]
    shard = job.parallel.dp_shard or shares // (job.parallel.dp_replicate or 1)
    if shard == 1 and cp == 1:
        shard = shares
    candidates = []
    ep = weighing.work.ep
    for name, stage in (("ddp", 0), ("zero1", 1), ("zero2", 2), ("zero3", 3)):
        if stage == 1 and ep > 1:
            continue  # experts are reduced over other ranks than the rest
        split = (
            ep // math.gcd(ep, cp) if stage == 0 else shard
        )  # of whole copies dp_shard is what ep folds over
        layout = Layout(pp=pp, dp_replicate=shares // split, dp_shard=split, cp=cp, tp=tp, ep=ep)
        candidates.append(weighing.candidate(name, stage, layout))
    return candidates


def explained(
    candidate: Candidate, chosen: Candidate, capacity_bytes: int, reason: str
) -> Candidate:
    """The candidate with the reason why it was chosen, which is `reason`, or why it was not."""
    if candidate is chosen:
        return replace(candidate, chosen=True, why=reason)
    if not candidate.fits:
        short = candidate.total_bytes - capacity_bytes
        return replace(candidate, why=f"does not fit: {format_bytes(short)} too much")
    if candidate.zero_stage > chosen.zero_stage:
        saved = chosen.total_bytes - candidate.total_bytes
        return replace(
            candidate,
            why=(
                f"saves {format_bytes(max(0, saved))} that are not needed, for more communication"
                if saved > 0
                else "no smaller here, for more communication"
            ),
        )
    return replace(candidate, why="the job asks for another")


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
