"""How many ranks a job gets, how many of them share a sample, and how the batch is split.

Torch-free.

What does not divide is refused with the nearest that does.
"""

from __future__ import annotations

import math

from phalanx.core.errors import LayoutError
from phalanx.core.units import plural
from phalanx.job.nearby import divisors, divisors_near, multiples_near, nearest
from phalanx.job.schema import Job
from phalanx.job.shape import ModelShape
from phalanx.plan.cluster import Cluster
from phalanx.plan.coverage import check_rules
from phalanx.plan.layout import fill_layout
from phalanx.plan.pipeline.asked import Asked, split_share
from phalanx.plan.replaced import require_fitting
from phalanx.plan.rules import heads_of, legal_degrees
from phalanx.plan.work import cuts_sequence

MAX_CPU_RANKS = 8


def choose_ranks(job: Job, cluster: Cluster, running: int | None) -> tuple[int, str]:
    """How many ranks, and why. `running`: how many there are already, if there are any."""
    asked = _asked(job)
    if running is not None:
        if asked is not None and asked != running:
            raise LayoutError(
                f"the job asks for {asked} ranks and {running} are running",
                fix=f"set parallel.ranks={running}",
            )
        ranks, why = running, f"{running} ranks are running"
    elif asked is not None:
        ranks, why = asked, f"{asked} ranks, as the job says"
    else:
        ranks = _most_that_share_the_batch(job, cluster)
        unit = "GPUs" if cluster.device == "cuda" else "CPU cores"
        if ranks == _degrees(job) > 1:
            axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
            given = [
                f"{axis}={degree}"
                for axis in axes
                if (degree := getattr(job.parallel, axis) or 1) > 1
            ]
            why = f"{ranks} ranks: as many as {' x '.join(given)} takes"
        else:
            why = (
                f"{ranks} ranks: the most that divide the batch of"
                f" {job.train.global_batch_size} on "
            )
            why += f"{cluster.num_devices} {unit}"
    if cluster.device == "cuda" and running is None and ranks > cluster.num_devices:
        raise LayoutError(f"{ranks} ranks were asked for and there are {cluster.num_devices} GPUs")
    _require_degrees_divide(job, ranks)
    return ranks, why


def _degrees(job: Job) -> int:
    """The product of those that the job gives."""
    of = job.parallel
    for_experts = (of.ep or 1) // math.gcd(of.ep or 1, of.cp or 1)  # ep folds over dp_shard x cp
    return (of.dp_replicate or 1) * (of.dp_shard or for_experts) * of.model_parallel_size


def _asked(job: Job) -> int | None:
    """How many ranks the job asks for, by their number or by degrees that make one."""
    asked, degrees = job.parallel.ranks, _degrees(job)
    if not (job.parallel.dp_replicate and job.parallel.dp_shard):
        return asked
    if asked and asked != degrees:
        shared = {
            "pp": job.parallel.pp or 1,
            "cp": job.parallel.cp or 1,
            "tp": job.parallel.tp or 1,
        }
        others = "".join(f" x {axis} {degree}" for axis, degree in shared.items() if degree > 1)
        raise LayoutError(
            f"parallel.dp_replicate {job.parallel.dp_replicate} x dp_shard"
            f" {job.parallel.dp_shard}{others} makes {degrees} ranks, and parallel.ranks is"
            f" {asked}",
            fix=f"set parallel.ranks={degrees}",
        )
    return degrees


def _most_that_share_the_batch(job: Job, cluster: Cluster) -> int:
    """On a GPU each; on a CPU no more than there are cores, but two of them to be distributed at
    all."""
    batch, micro = job.train.global_batch_size, job.train.micro_batch_size
    shared, degrees = job.parallel.model_parallel_size, _degrees(job)
    limit = (
        cluster.num_devices
        if cluster.device == "cuda"
        else max(2, min(cluster.num_devices, MAX_CPU_RANKS))
    )
    if cluster.device != "cuda":
        limit = max(limit, degrees)  # cores can be shared, and the job says between how many
    shares = divisors(batch // (micro or 1))
    legal = [d * shared for d in shares if d * shared <= limit and d * shared % degrees == 0]
    legal = [ranks for ranks in legal if batch % (ranks // shared * (micro or 1)) == 0]
    if not legal:
        raise LayoutError(
            f"no number of ranks up to {limit} divides global_batch_size {batch}"
            + (f" in microbatches of {micro}" if micro else "")
            + (f" and is a multiple of {degrees}" if degrees > 1 else ""),
            fix="change train.global_batch_size or set parallel.ranks",
        )
    return legal[-1]


def _require_degrees_divide(job: Job, ranks: int) -> None:
    if max(job.parallel.pp or 1, job.parallel.cp or 1) > 1:
        asked = {axis: getattr(job.parallel, axis) or 1 for axis in ("pp", "cp", "tp")}
        fill_layout(
            ranks, dp_replicate=job.parallel.dp_replicate, dp_shard=job.parallel.dp_shard, **asked
        )
        return
    tp = job.parallel.tp or 1
    if ranks % tp:
        near = (
            [f"nearest: {nearest(tp, legal)}"]
            if (legal := [d for d in divisors(ranks) if d > 1])
            else []
        )
        fix = ", or ".join([*near, f"parallel.ranks={multiples_near(ranks, tp)}"])
        raise LayoutError(f"parallel.tp {tp} does not divide the {plural(ranks, 'rank')}", fix=fix)
    for name, degree in (
        ("dp_replicate", job.parallel.dp_replicate),
        ("dp_shard", job.parallel.dp_shard),
    ):
        if degree and ranks // tp % degree:
            left = plural(ranks // tp, "rank")
            raise LayoutError(
                f"parallel.{name} {degree} does not divide the"
                f" {left}{f', what tp leaves of {ranks}' * (tp > 1)}",
                fix=(
                    f"nearest: {divisors_near(ranks // tp, degree)}, or "
                    f"parallel.ranks={multiples_near(ranks, tp * degree)}"
                ),
            )


def tensor_parallel_degree(job: Job, shape: ModelShape) -> int:
    """The degree of tp.

    Raises LayoutError for one that the model's heads forbid, naming the nearest they allow.
    """
    tp = job.parallel.tp or 1
    if tp == 1 or not shape.is_known:
        check_rules(job.parallel.rules, shape, tp)
        return tp
    legal = legal_degrees(shape.num_heads, shape.num_kv_heads)
    if tp not in legal:
        raise LayoutError(
            f"parallel.tp {tp} does not divide {heads_of(shape.num_heads, shape.num_kv_heads)}",
            fix=f"nearest: {nearest(tp, legal)}",
        )
    if job.parallel.sequence_parallel and shape.reads_images:
        raise LayoutError(
            f"a {shape.kind} cannot do with a part of its sequence: it pools all of it",
            fix="leave parallel.sequence_parallel out",
        )
    rules = check_rules(job.parallel.rules, shape, tp)
    if job.parallel.rules:
        require_fitting(rules, shape, tp, cuts_sequence=cuts_sequence(job, shape))
    return tp


def split_batch(job: Job, shares: int, asked: Asked | None = None) -> tuple[int, int]:
    """(micro_batch_size, microbatches per step) of each of `shares` ranks, or pipelines, that
    read other samples."""
    batch = job.train.global_batch_size
    if batch % shares:
        multiples = [batch // shares * shares, (batch // shares + 1) * shares]
        raise LayoutError(
            f"{shares} {'ranks' if asked is None else 'pipelines'} do not divide"
            f" train.global_batch_size {batch}",
            fix=(
                f"nearest batch: {nearest(batch, [m for m in multiples if m])}; "
                f"nearest ranks: {divisors_near(batch, shares)}"
            )
            + (f" x {job.parallel.model_parallel_size}" if asked is not None else ""),
        )
    share = batch // shares
    if asked is not None:
        return split_share(job, asked, share, shares)
    micro = job.train.micro_batch_size or share
    if share % micro:
        raise LayoutError(
            f"train.micro_batch_size {micro} does not divide the {share} sequences of each of"
            f" {shares} ranks",
            fix=f"nearest: {divisors_near(share, micro)}",
        )
    return micro, share // micro
