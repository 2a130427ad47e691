"""The layouts that a job could have on its ranks, each with the memory it takes and why it lost.

Torch-free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from phalanx.core.units import format_bytes
from phalanx.job.schema import Job, Parallel
from phalanx.job.shape import ModelShape
from phalanx.plan.cluster import Cluster
from phalanx.plan.context import context_bytes
from phalanx.plan.layout import Layout
from phalanx.plan.memory import (
    Workload,
    activation_bytes,
    exchanged_bytes,
    of_one_rank,
    rank_memory,
    staging_bytes,
)
from phalanx.plan.pipeline.memory import pipeline_memory, rank_activations, rank_staging
from phalanx.plan.pipeline.planned import Pipeline
from phalanx.plan.plan import Candidate

MIB = 2**20


@dataclass(frozen=True)
class Headroom:
    """What of a rank's memory a plan leaves alone: all but `share`, `runtime_bytes`, and so much
    per communicator.

    Of a CPU: interpreter and torch. Of a GPU, where nothing was measured yet: what fragments and
    libraries' workspaces take is in the share, the context and its kernels in the runtime, and
    buffers of NCCL in its communicators.
    """

    share: float
    runtime_bytes: int
    communicator_bytes: int = 0

    def capacity(self, whole_bytes: int, communicators: int) -> int:
        left = (
            round(whole_bytes * self.share)
            - self.runtime_bytes
            - self.communicator_bytes * communicators
        )
        return max(0, left)


CPU_HEADROOM = Headroom(0.94, 450 * MIB)
GPU_HEADROOM = Headroom(0.90, 614 * MIB, 200 * MIB)


def headroom_of(device: str) -> Headroom:
    return CPU_HEADROOM if device == "cpu" else GPU_HEADROOM


def whole_of(job: Job, cluster: Cluster, num_ranks: int) -> int:
    """Bytes of a rank's memory, whatever it is filled with."""
    asked = job.cluster.memory_gib
    return cluster.memory_per_rank(num_ranks) if asked is None else round(asked * 2**30)


def capacity_of(job: Job, cluster: Cluster, num_ranks: int) -> int:
    """Bytes a rank may fill beyond its runtime."""
    whole = whole_of(job, cluster, num_ranks)
    return headroom_of(cluster.device).capacity(whole, communicators_of(job.parallel, num_ranks))


def communicators_of(parallel: Parallel, num_ranks: int) -> int:
    """How many process groups a rank sends through: all ranks, and those of each axis.

    Of a pipeline each pair of neighbours and each direction is one of its own.
    """
    if num_ranks == 1:
        return 0
    pp, tp, cp, ep = (
        degree or 1 for degree in (parallel.pp, parallel.tp, parallel.cp, parallel.ep)
    )
    shares = num_ranks // (pp * tp)  # cp reduces gradients, too
    is_hybrid = (parallel.dp_replicate or 1) > 1 and (parallel.dp_shard or 1) * cp > 1
    if num_ranks in (tp, cp, shares // cp) and ep == 1 and not is_hybrid:
        return 1  # one axis, and it is all ranks
    of_experts = 2 if ep > 1 else 0  # those with other experts, and those with the same ones
    of_pipeline = 4 if pp > 2 else 2 if pp == 2 else 0
    return 1 + (tp > 1) + (cp > 1) + (shares > 1) + is_hybrid + of_experts + of_pipeline


def headroom_reasons(job: Job, cluster: Cluster, num_ranks: int) -> list[str]:
    """A line of a plan for GPUs."""
    if cluster.device == "cpu":
        return []
    room, count = headroom_of(cluster.device), communicators_of(job.parallel, num_ranks)
    of_groups = (
        f" and {count} x {format_bytes(room.communicator_bytes)} of communicators" if count else ""
    )
    whole = format_bytes(whole_of(job, cluster, num_ranks))
    return [
        f"memory: {room.share:.0%} of a GPU's {whole}, less {format_bytes(room.runtime_bytes)} of"
        f" its context{of_groups}, is planned with; this has not been measured on a GPU"
    ]


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
