"""The choices of how many ranks a job gets, and of how its batch and its sequences are split.

Torch-free.

What does not divide is refused with the nearest that does.
"""

from __future__ import annotations

from phalanx.core.errors import LayoutError
from phalanx.core.units import plural
from phalanx.job.nearest import (
    format_nearest_divisors,
    format_nearest_multiples,
    format_nearest_values,
    list_divisors,
)
from phalanx.job.schema import Job
from phalanx.plan.choice import REASON_DEFAULT, Choice
from phalanx.plan.cluster import Cluster
from phalanx.plan.layout import AXES, Layout, complete_layout_degrees
from phalanx.plan.pipeline.requested_schedule import RequestedSchedule, choose_pipeline_microbatches

MAX_DEFAULT_CPU_RANKS = 8


def choose_num_ranks(job: Job, cluster: Cluster, running: int | None) -> Choice[int]:
    """The number of ranks. `running`: the number of those that run already, if any do."""
    requested = _find_requested_ranks(job)
    if running is not None:
        if requested is not None and requested != running:
            raise LayoutError(
                f"the job asks for {requested} ranks and {running} are running",
                fix=f"set parallel.ranks={running}",
            )
        ranks, why = running, f"{plural(running, 'rank')} running already"
    elif requested is not None:
        ranks, why = requested, f"{plural(requested, 'rank')}, as the job says"
    else:
        ranks = _find_max_ranks_sharing_batch_evenly(job, cluster)
        why = _explain_max_ranks(job, cluster, ranks)
    # Running ranks may be on several machines, of which this is one.
    if cluster.device == "cuda" and running is None and ranks > cluster.num_devices:
        raise LayoutError(f"{ranks} ranks were asked for and there are {cluster.num_devices} GPUs")
    _require_degrees_divide_ranks(job, ranks)
    return Choice(ranks, why)


def _explain_max_ranks(job: Job, cluster: Cluster, ranks: int) -> str:
    if ranks == _multiply_requested_degrees(job) > 1:
        degrees = job.parallel.degrees.degrees_above_one()
        product = " x ".join(f"{axis}={degree}" for axis, degree in degrees.items())
        return f"{plural(ranks, 'rank')}: as many as {product} takes"
    unit = "CPU cores"
    if cluster.device == "cuda":
        unit = "GPUs"
    return (
        f"{plural(ranks, 'rank')}: the most that divide the batch of"
        f" {job.train.global_batch_size} on {cluster.num_devices} {unit}"
    )


def _multiply_requested_degrees(job: Job) -> int:
    """The product of the degrees that the job gives."""
    degrees = job.parallel.degrees
    # ep folds over dp_shard x cp: where the job leaves dp_shard out, it is what ep needs.
    shards = job.parallel.dp_shard or degrees.num_expert_shards
    return degrees.dp_replicate * shards * degrees.model_parallel_size


def _find_requested_ranks(job: Job) -> int | None:
    """The number of ranks that the job asks for, by `ranks` or by degrees that make it; None if it
    is open."""
    requested, degrees = job.parallel.ranks, _multiply_requested_degrees(job)
    if not (job.parallel.dp_replicate and job.parallel.dp_shard):
        return requested
    if requested and requested != degrees:
        shared = job.parallel.degrees.degrees_above_one("pp", "cp", "tp")
        model_axes = "".join(f" x {axis} {degree}" for axis, degree in shared.items())
        raise LayoutError(
            f"parallel.dp_replicate {job.parallel.dp_replicate} x dp_shard"
            f" {job.parallel.dp_shard}{model_axes} makes {degrees} ranks, and parallel.ranks is"
            f" {requested}",
            fix=f"set parallel.ranks={degrees}",
        )
    return degrees


def _find_max_ranks_sharing_batch_evenly(job: Job, cluster: Cluster) -> int:
    """The most ranks that share the batch evenly: on GPUs one each; on a CPU no more than there are
    cores, but two, to be distributed at all."""
    batch, micro = job.train.global_batch_size, job.train.micro_batch_size
    shared, degrees = job.parallel.degrees.model_parallel_size, _multiply_requested_degrees(job)
    limit = cluster.num_devices
    if cluster.device != "cuda":
        # Two even on one core: a first run is to be distributed.
        limit = max(2, min(cluster.num_devices, MAX_DEFAULT_CPU_RANKS))
        limit = max(limit, degrees)  # cores can be shared, and the job says between how many
    samples = micro or 1  # where the job leaves them open, microbatches of one sample can be
    legal = []
    # Divisors ascend, and so does `legal`: its last one is the most.
    for share in list_divisors(batch // samples):
        ranks = share * shared
        if ranks <= limit and ranks % degrees == 0 and batch % (share * samples) == 0:
            legal.append(ranks)
    if not legal:
        problem = f"no number of ranks up to {limit} divides global_batch_size {batch}"
        if micro:
            problem += f" in microbatches of {micro}"
        if degrees > 1:
            problem += f" and is a multiple of {degrees}"
        raise LayoutError(problem, fix="change train.global_batch_size or set parallel.ranks")
    return legal[-1]


def _require_degrees_divide_ranks(job: Job, ranks: int) -> None:
    degrees = job.parallel.degrees
    if max(degrees.pp, degrees.cp) > 1:
        complete_layout_degrees(
            ranks,
            pp=degrees.pp,
            dp_replicate=job.parallel.dp_replicate,
            dp_shard=job.parallel.dp_shard,
            cp=degrees.cp,
            tp=degrees.tp,
        )
        return
    tp = degrees.tp
    if ranks % tp:
        fix = f"parallel.ranks={format_nearest_multiples(ranks, tp)}"
        if legal := [degree for degree in list_divisors(ranks) if degree > 1]:
            fix = f"nearest: {format_nearest_values(tp, legal)}, or {fix}"
        raise LayoutError(f"parallel.tp {tp} does not divide the {plural(ranks, 'rank')}", fix=fix)
    for name, degree in (
        ("dp_replicate", job.parallel.dp_replicate),
        ("dp_shard", job.parallel.dp_shard),
    ):
        if degree and ranks // tp % degree:
            remaining = plural(ranks // tp, "rank")
            if tp > 1:
                remaining += f", what tp leaves of {ranks}"
            raise LayoutError(
                f"parallel.{name} {degree} does not divide the {remaining}",
                fix=(
                    f"nearest: {format_nearest_divisors(ranks // tp, degree)}, or "
                    f"parallel.ranks={format_nearest_multiples(ranks, tp * degree)}"
                ),
            )


def choose_micro_batch_size_and_count(
    job: Job, shares: int, requested: RequestedSchedule | None = None
) -> tuple[int, int]:
    """(micro_batch_size, microbatches per step) of each of `shares` ranks, or pipelines, that
    read other samples."""
    batch = job.train.global_batch_size
    if batch % shares:
        below = batch // shares * shares
        # Below the first multiple there is only 0, which is no batch.
        multiples = [multiple for multiple in (below, below + shares) if multiple]
        readers = "ranks"
        fix = (
            f"nearest batch: {format_nearest_values(batch, multiples)};"
            f" nearest ranks: {format_nearest_divisors(batch, shares)}"
        )
        if requested is not None:
            readers = "pipelines"
            fix += f" x {job.parallel.degrees.model_parallel_size}"
        raise LayoutError(
            f"{shares} {readers} do not divide train.global_batch_size {batch}", fix=fix
        )
    share = batch // shares
    if requested is not None:
        return choose_pipeline_microbatches(job, requested, share, shares)
    # Left open, a rank's whole share is one microbatch: nothing accumulates.
    micro = job.train.micro_batch_size or share
    if share % micro:
        raise LayoutError(
            f"train.micro_batch_size {micro} does not divide the {share} sequences of each of"
            f" {shares} ranks",
            fix=f"nearest: {format_nearest_divisors(share, micro)}",
        )
    return micro, share // micro


def choose_dp_replicate(layout: Layout) -> Choice[int]:
    """The number of copies of the model, or of its shards, and what it follows from."""
    return Choice(layout.dp_replicate, _explain_remaining_degree(layout, "dp_replicate"))


def choose_dp_shard(layout: Layout, zero_stage: int) -> Choice[int]:
    """The number of ranks that a copy is sharded over, and what it follows from."""
    why = _explain_remaining_degree(layout, "dp_shard")
    if layout.ep > 1 and zero_stage == 0:
        why = f"ep {layout.ep} spreads experts over them"
    elif zero_stage == 0:
        why = "nothing is sharded"
    return Choice(layout.dp_shard, why)


def _explain_remaining_degree(layout: Layout, axis: str) -> str:
    """The degree of `axis` as what the other axes leave of the ranks: '4 ranks / tp 2'."""
    factors = [plural(layout.world_size, "rank")]
    for other in AXES:
        if other != axis and getattr(layout, other) > 1:
            factors.append(f"{other} {getattr(layout, other)}")
    return " / ".join(factors)


def choose_cp_load_balance(job: Job) -> Choice[str]:
    """The way in which sequences are cut between the ranks of cp."""
    if job.parallel.cp_attention == "ulysses":
        return Choice("none", "ulysses computes on whole sequences, in any order of their parts")
    return Choice(job.parallel.cp_load_balance, REASON_DEFAULT)


def choose_collectives(job: Job, device: str, num_ranks: int) -> Choice[str]:
    """What the ranks exchange tensors through; "auto" is decided where they meet."""
    if num_ranks == 1:
        why = "one rank has nobody to talk to"
    elif device != "cpu":
        why = "GPUs go through NCCL, whatever this says"
    else:
        why = "shared memory between ranks of one host, gloo between hosts"
    return Choice(job.parallel.collectives, why)
