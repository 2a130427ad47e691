"""From a job to a plan: layout, microbatches, memory per rank, and the reasons. Torch-free, JSON in and out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.core.batch import BYTE_VOCAB_SIZE
from phalanx.core.digest import digest
from phalanx.core.errors import DataError, LayoutError
from phalanx.core.registry import is_foreign
from phalanx.core.units import format_bytes, format_count
from phalanx.job.foreign import probe_foreign_shape
from phalanx.job.model import shape_of, what_follows
from phalanx.job.rate import peak_rate
from phalanx.job.schema import Job
from phalanx.job.shape import ModelShape
from phalanx.plan.cluster import Cluster, detect_cluster
from phalanx.plan.layout import Layout
from phalanx.plan.memory import Workload, rank_memory, staging_bytes
from phalanx.plan.warnings import DataFacts, EarlyWarning, early_warnings, epoch_ends

SHAPE_CACHE = Path(os.path.expanduser("~/.cache/phalanx/shapes"))  # keyed by the sources of the user's module
MAX_CPU_RANKS = 8
HEADROOM = 0.94  # part of a rank's memory a plan may fill
RUNTIME_BYTES = 450 * 2**20  # interpreter and torch of one CPU rank


@dataclass(frozen=True)
class Candidate:
    """One layout that was weighed. `predicted_bytes` by category, on top of the runtime."""

    name: str  # ddp, zero1, zero2, zero3, or one (a single rank)
    zero_stage: int
    layout: Layout
    predicted_bytes: dict[str, int]
    fits: bool
    chosen: bool = False
    why: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(self.predicted_bytes.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"layout": self.layout.to_json(), "total_bytes": self.total_bytes}


@dataclass(frozen=True)
class Plan:
    """What follows from a job on a cluster. Frozen; `to_json` and `from_json` are inverses."""

    job_digest: str
    layout: Layout
    device: str
    precision: str
    recompute: str
    compile: bool
    zero_stage: int
    bucket_mb: float
    sync_batchnorm: bool
    seed: int
    global_batch_size: int
    micro_batch_size: int
    num_microbatches: int
    seq_len: int
    peak_lr: float
    vocab_size: int
    num_params: int
    flops_per_token: float | None
    capacity_bytes: int
    alternatives: tuple[Candidate, ...] = ()
    reasons: tuple[str, ...] = ()
    warnings: tuple[EarlyWarning, ...] = ()
    shape: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def targets_per_rank(self) -> int:
        """Targets of one rank in one step when none is masked: tokens, or the labels of images."""
        per_sample = 1 if self.model_shape.reads_images else self.seq_len
        return self.num_microbatches * self.micro_batch_size * per_sample

    @property
    def model_shape(self) -> ModelShape:
        """What the plan knows of the model."""
        return ModelShape.from_json(self.shape)

    @property
    def chosen(self) -> Candidate:
        return next(candidate for candidate in self.alternatives if candidate.chosen)

    def to_json(self) -> dict[str, Any]:
        body = asdict(self) | {"layout": self.layout.to_json(), "world_size": self.world_size}
        body["alternatives"] = [candidate.to_json() for candidate in self.alternatives]
        body["reasons"] = list(self.reasons)
        body["warnings"] = [asdict(warning) for warning in self.warnings]
        chosen = self.chosen
        body["memory"] = {
            "predicted_bytes": chosen.predicted_bytes,
            "total_bytes": chosen.total_bytes,
            "capacity_bytes": self.capacity_bytes,
            "fits": chosen.fits,
        }
        return body

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Plan:
        values = {name: body[name] for name in cls.__dataclass_fields__}
        values["layout"] = Layout.from_json(body["layout"])
        fields = Candidate.__dataclass_fields__
        values["alternatives"] = tuple(
            Candidate(**{k: v for k, v in c.items() if k in fields} | {"layout": Layout.from_json(c["layout"])})
            for c in body["alternatives"]
        )
        values["reasons"] = tuple(body["reasons"])
        values["warnings"] = tuple(EarlyWarning(**warning) for warning in body["warnings"])
        return cls(**values)


def make_plan(
    job: Job,
    *,
    cluster: Cluster | None = None,
    vocab_size: int | None = None,
    num_ranks: int | None = None,
    shape: ModelShape | None = None,
    data: DataFacts | None = None,
) -> Plan:
    """Choose the simplest layout that fits and say why.

    `shape` saves describing a user's own module again, which takes another process a few seconds.
    `vocab_size` comes from the data when the job leaves it open; `num_ranks` is fixed when ranks run already (under
    another launcher); `data`, once it is known, is what some warnings are about. Raises LayoutError (exit 3) for ranks
    or batches that do not divide, naming the nearest that do, and for a layout that was asked for and cannot fit.
    """
    cluster = cluster or detect_cluster(job.cluster.device)
    if shape is None:
        shape = foreign_shape(job) or shape_of(job, vocab_size or BYTE_VOCAB_SIZE)
    if vocab_size and 0 < shape.vocab_size < vocab_size:
        raise DataError(
            f"the data has a vocabulary of {vocab_size} tokens and the model one of {shape.vocab_size}",
            fix=f"set model.vocab_size={vocab_size}, or use the tokenizer of the model",
        )
    ranks, reasons = _choose_ranks(job, cluster, num_ranks)
    micro, num_microbatches = _split_batch(job, ranks)
    # What an own module makes of an own sample, nobody knows: a sample is one thing then.
    seq_len = shape.tokens_of(job.data.seq_len) if shape.is_known or not _has_own_dataset(job) else 1
    work = Workload(
        micro,
        seq_len,
        job.precision.compute,
        job.train.recompute,
        job.train.loss_chunk_tokens,
        num_microbatches,
        job.data.document_masks,
        _optimizer_bytes(job),
        _copies_state(job),
    )
    capacity = _capacity(job, cluster, ranks)
    candidates = _weigh(job, shape, work, ranks, capacity, cluster.device)
    more_ranks = partial(_more_ranks, shape, work, ranks, capacity, cluster.device)
    chosen = _choose(job, candidates, capacity, reasons, more_ranks)
    alternatives = tuple(_explain(c, chosen, capacity, reasons[-1]) for c in candidates)
    reasons += what_follows(job.model)
    flops = shape.flops_per_token(job.data.seq_len)["training"] if shape.is_known else None
    if flops is None:
        reasons.append(
            "activations of your own model are not predicted; memory counts weights, gradients and optimizer"
        )
    if work.copies_state:
        size = format_bytes(staging_bytes(shape, work, ranks))
        where = "pinned host memory" if cluster.device == "cuda" else "memory"
        reasons.append(
            f"training goes on while it is saved, from a copy of the state: {size} of {where} per rank; "
            "checkpoint.asynchronous=false does without"
        )
    peak = peak_rate(job)
    reasons += [peak.why] if peak.why else []
    plan = Plan(
        job_digest=job_digest(job),
        layout=chosen.layout,
        device=cluster.device,
        precision=job.precision.compute,
        recompute=job.train.recompute,
        compile=job.train.compile,
        zero_stage=chosen.zero_stage,
        bucket_mb=job.parallel.bucket_mb,
        sync_batchnorm=job.parallel.sync_batchnorm,
        seed=job.run.seed,
        global_batch_size=job.train.global_batch_size,
        micro_batch_size=micro,
        num_microbatches=num_microbatches,
        seq_len=seq_len,
        peak_lr=peak.lr,
        vocab_size=shape.vocab_size if shape.is_known else vocab_size or 0,
        num_params=shape.num_params,
        flops_per_token=flops,
        capacity_bytes=capacity,
        alternatives=alternatives,
        reasons=tuple(reasons),
        shape=shape.to_json(),
    )
    told = epoch_ends(job, plan, data)
    reasons += [told] if told else []
    return replace(plan, reasons=tuple(reasons), warnings=early_warnings(job, plan, data))


def job_digest(job: Job) -> str:
    """What a run is known by: the job, wherever it runs."""
    body = job.to_json()
    del body["run"]["dir"]
    return digest(body)


def foreign_shape(job: Job) -> ModelShape | None:
    """What can be measured of a user's own module; None for a built-in one."""
    if job.model.kind is None or not is_foreign(job.model.kind):
        return None
    return probe_foreign_shape(job.model.kind, job.model.args, SHAPE_CACHE)


def _has_own_dataset(job: Job) -> bool:
    names = job.data.source.replace(":", ".").split(".")
    is_name = is_foreign(job.data.source) and all(name.isidentifier() for name in names)
    return is_name and not job.data.mixture and not os.path.exists(job.data.source)


def _optimizer_bytes(job: Job) -> int:
    """Per parameter: two fp32 moments of AdamW, one of SGD with momentum; of an own optimizer as many as AdamW."""
    if job.optim.kind == "sgd":
        return 4 if job.optim.momentum else 0
    return 8


def _copies_state(job: Job) -> bool:
    """True if anything is saved on the way: the saves at the end and at a stop are waited for, and need no copy."""
    return job.checkpoint.asynchronous and (job.checkpoint.has_interval or job.eval.keep_best)


def divisors(number: int) -> list[int]:
    """In ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def nearest(wanted: int, legal: list[int]) -> str:
    """The legal values just below and above `wanted`, as "4 or 8"."""
    below = [value for value in legal if value < wanted][-1:]
    above = [value for value in legal if value > wanted][:1]
    return " or ".join(map(str, below + above)) or "none"


def _choose_ranks(job: Job, cluster: Cluster, running: int | None) -> tuple[int, list[str]]:
    """How many ranks, and why."""
    asked = job.parallel.ranks
    degrees = (job.parallel.dp_replicate or 1) * (job.parallel.dp_shard or 1)
    if job.parallel.dp_replicate and job.parallel.dp_shard:
        asked = asked or degrees
        if asked != degrees:
            raise LayoutError(
                f"parallel.dp_replicate {job.parallel.dp_replicate} x dp_shard {job.parallel.dp_shard} makes {degrees} "
                f"ranks, and parallel.ranks is {asked}",
                fix=f"set parallel.ranks={degrees}",
            )
    if running is not None:
        if asked is not None and asked != running:
            raise LayoutError(
                f"the job asks for {asked} ranks and {running} are running", fix=f"set parallel.ranks={running}"
            )
        asked, why = running, f"{running} ranks are running"
    elif asked is not None:
        why = f"{asked} ranks, as the job says"
    else:
        limit = cluster.num_devices if cluster.device == "cuda" else max(2, min(cluster.num_devices, MAX_CPU_RANKS))
        legal = [d for d in divisors(job.train.global_batch_size) if d <= limit and d % degrees == 0]
        legal = [d for d in legal if job.train.global_batch_size % (d * (job.train.micro_batch_size or 1)) == 0]
        if not legal:
            raise LayoutError(
                f"no number of ranks up to {limit} divides global_batch_size {job.train.global_batch_size}"
                + (f" in microbatches of {job.train.micro_batch_size}" if job.train.micro_batch_size else "")
                + (f" and is a multiple of {degrees}" if degrees > 1 else ""),
                fix="change train.global_batch_size or set parallel.ranks",
            )
        asked = legal[-1]
        unit = "GPUs" if cluster.device == "cuda" else "CPU cores"
        why = f"{asked} ranks: the most that divide the batch of {job.train.global_batch_size} on "
        why += f"{cluster.num_devices} {unit}"
    if cluster.device == "cuda" and running is None and asked > cluster.num_devices:
        raise LayoutError(f"{asked} ranks were asked for and there are {cluster.num_devices} GPUs")
    for name, degree in (("dp_replicate", job.parallel.dp_replicate), ("dp_shard", job.parallel.dp_shard)):
        if degree and asked % degree:
            raise LayoutError(
                f"parallel.{name} {degree} does not divide the {asked} ranks",
                fix=f"nearest: {nearest(degree, divisors(asked))}",
            )
    return asked, [why]


def _split_batch(job: Job, ranks: int) -> tuple[int, int]:
    """(micro_batch_size, microbatches per rank and step)."""
    batch = job.train.global_batch_size
    if batch % ranks:
        multiples = [batch // ranks * ranks, (batch // ranks + 1) * ranks]
        raise LayoutError(
            f"{ranks} ranks do not divide train.global_batch_size {batch}",
            fix=f"nearest batch: {nearest(batch, [m for m in multiples if m])}; "
            f"nearest ranks: {nearest(ranks, divisors(batch))}",
        )
    share = batch // ranks
    micro = job.train.micro_batch_size or share
    if share % micro:
        raise LayoutError(
            f"train.micro_batch_size {micro} does not divide the {share} sequences of each of {ranks} ranks",
            fix=f"nearest: {nearest(micro, divisors(share))}",
        )
    return micro, share // micro


def _capacity(job: Job, cluster: Cluster, ranks: int) -> int:
    """Bytes a rank may fill beyond its runtime."""
    whole = cluster.memory_per_rank(ranks)
    if job.cluster.memory_gib is not None:
        whole = round(job.cluster.memory_gib * 2**30)
    return max(0, round(whole * HEADROOM) - RUNTIME_BYTES)


def _weigh(job: Job, shape: ModelShape, work: Workload, ranks: int, capacity: int, device: str) -> list[Candidate]:
    if ranks == 1:
        memory = rank_memory(shape, work, 0, 1, device, ranks)
        return [Candidate("one", 0, Layout(), memory, sum(memory.values()) <= capacity)]
    shard = job.parallel.dp_shard or ranks // (job.parallel.dp_replicate or 1)
    if shard == 1:
        shard = ranks
    candidates = []
    for name, stage in (("ddp", 0), ("zero1", 1), ("zero2", 2), ("zero3", 3)):
        split = 1 if stage == 0 else shard
        memory = rank_memory(shape, work, stage, split, device, ranks)
        layout = Layout(dp_replicate=ranks // split, dp_shard=split)
        candidates.append(Candidate(name, stage, layout, memory, sum(memory.values()) <= capacity))
    return candidates


def _choose(
    job: Job, candidates: list[Candidate], capacity: int, reasons: list[str], more_ranks: Callable[[], str]
) -> Candidate:
    """What the job fixes, else the first that fits in the order one, ddp, zero2, zero3."""
    runnable = [c for c in candidates if c.zero_stage != 1]
    shard, replicate, stage = job.parallel.dp_shard, job.parallel.dp_replicate, job.parallel.zero_stage
    ranks = candidates[0].layout.world_size
    if ranks > 1 and (shard or stage or (replicate is not None and replicate < ranks)):
        sharded = (shard or ranks // (replicate or 1)) > 1
        runnable = [c for c in runnable if c.zero_stage == ((stage or 3) if sharded else 0)]
        reasons.append(f"{runnable[0].name} over {runnable[0].layout}, as the job says")
    elif ranks > 1 and replicate == ranks:
        runnable = [c for c in runnable if c.zero_stage == 0]
        reasons.append("ddp, as the job says")
    for candidate in runnable:
        if candidate.fits:
            if len(runnable) > 1:
                reasons.append(
                    f"{candidate.name}: the simplest that fits ({format_bytes(candidate.total_bytes)} of "
                    f"{format_bytes(capacity)} per rank)"
                )
            return candidate
    least = min(runnable, key=lambda c: c.total_bytes)
    largest = max(least.predicted_bytes, key=lambda k: least.predicted_bytes[k])
    others = [c for c in candidates if c.fits and c.zero_stage != 1]
    fix = f"{others[0].name} would fit" if others else _how_to_shrink(largest) or more_ranks()
    if capacity == 0:
        fix = "use fewer ranks: interpreter and torch alone fill what each of them has"
    raise LayoutError(
        f"{least.name} needs {format_bytes(least.total_bytes)} per rank and {format_bytes(capacity)} are there",
        why=f"the largest part is {largest}, {format_bytes(least.predicted_bytes[largest])}",
        fix=fix,
    )


def _more_ranks(shape: ModelShape, work: Workload, ranks: int, capacity: int, device: str) -> str:
    """Over how many ranks, doubling, zero3 fits if each has as much memory as these have, or what stays too large."""
    memory: dict[str, int] = {}
    for doubled in range(1, 16):
        more = ranks * 2**doubled
        memory = rank_memory(shape, work, 3, more, device, more)
        if sum(memory.values()) <= capacity:
            return f"use more ranks ({more:,} with as much memory each: zero3 fits there) or a smaller model"
    largest = max(memory, key=lambda part: memory[part])
    remedy = _how_to_shrink(largest) or "use a smaller model or ranks with more memory"
    return (
        f"{remedy}: more ranks do not help, over {more:,} of them {largest} alone take {format_bytes(memory[largest])}"
    )


def _how_to_shrink(largest: str) -> str:
    return {
        "activations": "use a smaller train.micro_batch_size or train.recompute=full",
        "loss": "use a smaller train.loss_chunk_tokens",
        "staging": "use checkpoint.asynchronous=false",
    }.get(largest, "")


def _explain(candidate: Candidate, chosen: Candidate, capacity: int, reason: str) -> Candidate:
    if candidate is chosen:
        return replace(candidate, chosen=True, why=reason)
    if candidate.zero_stage == 1:
        return replace(candidate, why="arithmetic only: this release runs ddp, zero2 and zero3")
    if not candidate.fits:
        short = candidate.total_bytes - capacity
        return replace(candidate, why=f"does not fit: {format_bytes(short)} too much")
    if candidate.zero_stage > chosen.zero_stage:
        saved = chosen.total_bytes - candidate.total_bytes
        return replace(
            candidate,
            why=f"saves {format_bytes(max(0, saved))} that are not needed, for more communication"
            if saved > 0
            else "no smaller here, for more communication",
        )
    return replace(candidate, why="the job asks for another")


def describe(plan: Plan, *, of_samples: bool = False) -> list[str]:
    """The plan in a few lines of text for a terminal or a log. `of_samples`: of the user's own data, no sequences."""
    chosen, shape = plan.chosen, plan.model_shape
    what = f"images x {plan.seq_len} tokens" if shape.reads_images else f"sequences x {plan.seq_len} tokens"
    if plan.seq_len == 1 or (of_samples and not shape.reads_images):
        what = "samples"
    active = f", {format_count(shape.num_active_params)} of them active" if shape.num_experts else ""
    flops = f" ({format_count(plan.flops_per_token)}FLOP per token)" if plan.flops_per_token else ""
    lines = [
        f"plan    {format_count(plan.num_params)} parameters{active}{flops}, {plan.precision} on {plan.world_size} "
        f"{plan.device} rank{'s' if plan.world_size > 1 else ''}: {chosen.name} ({plan.layout})",
        f"        {plan.global_batch_size} {what} per step = {plan.world_size} ranks x "
        f"{plan.num_microbatches} x {plan.micro_batch_size}",
    ]
    lines += [f"why     {reason}" for reason in plan.reasons]
    lines += [f"warn    {warning.text}" for warning in plan.warnings]
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in chosen.predicted_bytes.items() if size)
    lines.append(f"memory  {format_bytes(chosen.total_bytes)} per rank predicted: {parts}")
    for candidate in plan.alternatives:
        if not candidate.chosen:
            lines.append(f"not     {candidate.name} ({format_bytes(candidate.total_bytes)}): {candidate.why}")
    return lines
