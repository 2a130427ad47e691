"""The decisions of how many ranks a job gets, of the degrees along tp, cp and ep, and of how the
batch is split.

Torch-free.

What does not divide is refused with the nearest that does.
"""

from __future__ import annotations

from phalanx.core.errors import LayoutError
from phalanx.core.units import plural
from phalanx.job.checks.experts import (
    experts_have_no_conflicts,
    explain_undivided,
    find_misfit,
    find_ranks_for_experts,
)
from phalanx.job.costs import Heads, ModelCosts
from phalanx.job.hugging_face import is_hugging_face
from phalanx.job.nearest import divisors, divisors_near, multiples_near, nearest
from phalanx.job.schema import Job
from phalanx.plan.choice import DEFAULT, Choice
from phalanx.plan.cluster import Cluster
from phalanx.plan.layout import fill_layout
from phalanx.plan.pipeline.requested_schedule import RequestedSchedule, split_pipeline_batch
from phalanx.plan.rule_checks import check_overrides, check_rules
from phalanx.plan.rules import describe_heads, legal_degrees
from phalanx.plan.workload import cuts_sequence

MAX_CPU_RANKS = 8


def choose_ranks(job: Job, cluster: Cluster, running: int | None) -> Choice[int]:
    """The number of ranks. `running`: the number of those that run already, if any do."""
    requested = _find_requested_ranks(job)
    if running is not None:
        if requested is not None and requested != running:
            raise LayoutError(
                f"the job asks for {requested} ranks and {running} are running",
                fix=f"set parallel.ranks={running}",
            )
        ranks, why = running, f"{running} ranks are running"
    elif requested is not None:
        ranks, why = requested, f"{requested} ranks, as the job says"
    else:
        ranks = _find_max_ranks(job, cluster)
        unit = "GPUs" if cluster.device == "cuda" else "CPU cores"
        if ranks == _multiply_degrees(job) > 1:
            named = [
                f"{axis}={degree}" for axis, degree in job.parallel.degrees.above_one().items()
            ]
            why = f"{ranks} ranks: as many as {' x '.join(named)} takes"
        else:
            why = (
                f"{ranks} ranks: the most that divide the batch of"
                f" {job.train.global_batch_size} on "
            )
            why += f"{cluster.num_devices} {unit}"
    if cluster.device == "cuda" and running is None and ranks > cluster.num_devices:
        raise LayoutError(f"{ranks} ranks were asked for and there are {cluster.num_devices} GPUs")
    _require_degrees_divide(job, ranks)
    return Choice(ranks, why)


def _multiply_degrees(job: Job) -> int:
    """The product of the degrees that the job gives."""
    degrees = job.parallel.degrees
    # ep folds over dp_shard x cp: where the job leaves dp_shard out, it is what ep needs.
    shards = job.parallel.dp_shard or degrees.num_expert_shards
    return degrees.dp_replicate * shards * degrees.model_parallel_size


def _find_requested_ranks(job: Job) -> int | None:
    """The number of ranks that the job asks for, by `ranks` or by degrees that make it; None if it
    is open."""
    requested, degrees = job.parallel.ranks, _multiply_degrees(job)
    if not (job.parallel.dp_replicate and job.parallel.dp_shard):
        return requested
    if requested and requested != degrees:
        shared = job.parallel.degrees.above_one("pp", "cp", "tp")
        model_axes = "".join(f" x {axis} {degree}" for axis, degree in shared.items())
        raise LayoutError(
            f"parallel.dp_replicate {job.parallel.dp_replicate} x dp_shard"
            f" {job.parallel.dp_shard}{model_axes} makes {degrees} ranks, and parallel.ranks is"
            f" {requested}",
            fix=f"set parallel.ranks={degrees}",
        )
    return degrees


def _find_max_ranks(job: Job, cluster: Cluster) -> int:
    """The most ranks that share the batch evenly: on GPUs one each; on a CPU no more than there are
    cores, but two, to be distributed at all."""
    batch, micro = job.train.global_batch_size, job.train.micro_batch_size
    shared, degrees = job.parallel.degrees.model_parallel_size, _multiply_degrees(job)
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
    degrees = job.parallel.degrees
    if max(degrees.pp, degrees.cp) > 1:
        fill_layout(
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
        nearest_tp = (
            [f"nearest: {nearest(tp, legal)}"]
            if (legal := [d for d in divisors(ranks) if d > 1])
            else []
        )
        fix = ", or ".join([*nearest_tp, f"parallel.ranks={multiples_near(ranks, tp)}"])
        raise LayoutError(f"parallel.tp {tp} does not divide the {plural(ranks, 'rank')}", fix=fix)
    for name, degree in (
        ("dp_replicate", job.parallel.dp_replicate),
        ("dp_shard", job.parallel.dp_shard),
    ):
        if degree and ranks // tp % degree:
            remaining = plural(ranks // tp, "rank")
            raise LayoutError(
                f"parallel.{name} {degree} does not divide the"
                f" {remaining}{f', what tp leaves of {ranks}' * (tp > 1)}",
                fix=(
                    f"nearest: {divisors_near(ranks // tp, degree)}, or "
                    f"parallel.ranks={multiples_near(ranks, tp * degree)}"
                ),
            )


def tensor_parallel_degree(job: Job, shape: ModelCosts) -> int:
    """The degree of tp.

    Raises LayoutError for one that the model's heads forbid, naming the nearest they allow.
    """
    tp = job.parallel.degrees.tp
    heads = shape.heads
    if tp == 1 or heads is None:
        check_rules(job.parallel.rules, shape, tp)
        return tp
    legal = legal_degrees(heads.queries, heads.keys)
    if tp not in legal:
        raise LayoutError(
            f"parallel.tp {tp} does not divide {describe_heads(heads.queries, heads.keys)}",
            fix=f"nearest: {nearest(tp, legal)}",
        )
    if job.parallel.sequence_parallel and shape.is_per_token_outside_regions is False:
        raise LayoutError(
            f"a {shape.kind} cannot do with a part of its sequence: it pools all of it",
            fix="leave parallel.sequence_parallel out",
        )
    rules = check_rules(job.parallel.rules, shape, tp)
    if job.parallel.rules:
        check_overrides(rules, shape, tp, cuts_sequence=cuts_sequence(job, shape))
    return tp


def split_batch(
    job: Job, shares: int, requested: RequestedSchedule | None = None
) -> tuple[int, int]:
    """(micro_batch_size, microbatches per step) of each of `shares` ranks, or pipelines, that
    read other samples."""
    batch = job.train.global_batch_size
    if batch % shares:
        multiples = [batch // shares * shares, (batch // shares + 1) * shares]
        raise LayoutError(
            f"{shares} {'ranks' if requested is None else 'pipelines'} do not divide"
            f" train.global_batch_size {batch}",
            fix=(
                f"nearest batch: {nearest(batch, [m for m in multiples if m])}; "
                f"nearest ranks: {divisors_near(batch, shares)}"
            )
            + (f" x {job.parallel.degrees.model_parallel_size}" if requested is not None else ""),
        )
    share = batch // shares
    if requested is not None:
        return split_pipeline_batch(job, requested, share, shares)
    micro = job.train.micro_batch_size or share
    if share % micro:
        raise LayoutError(
            f"train.micro_batch_size {micro} does not divide the {share} sequences of each of"
            f" {shares} ranks",
            fix=f"nearest: {divisors_near(share, micro)}",
        )
    return micro, share // micro


def choose_load_balance(job: Job) -> Choice[str]:
    """The way in which sequences are cut between the ranks of cp."""
    if job.parallel.cp_attention == "ulysses":
        return Choice("none", "ulysses computes on whole sequences, in any order of their parts")
    return Choice(job.parallel.cp_load_balance, DEFAULT)


def context_parallel_degree(job: Job, shape: ModelCosts, tp: int) -> int:
    """The degree of cp.

    Raises LayoutError for what it cannot do, naming the nearest that it can.
    """
    cp = job.parallel.degrees.cp
    if cp == 1:
        return 1
    if shape.why_samples_stay_whole:
        raise LayoutError(
            f"parallel.cp {cp} cuts sequences of tokens, and {shape.why_samples_stay_whole}",
            fix="leave parallel.cp out",
        )
    if is_hugging_face(job.model.kind):
        raise LayoutError(
            f"parallel.cp {cp} needs an attention that asks other ranks for their keys and values,"
            " and those of Hugging Face have no such seam",
            fix="leave parallel.cp out, or see docs/context-parallel.md for the seam",
        )
    if not shape.has_attention_seam:
        raise no_attention_seam_error(shape.kind)
    if job.model.objective is not None:
        raise LayoutError(
            f"parallel.cp {cp} gives an objective a part of each sequence, and nobody knows if"
            " yours can do with it",
            fix="leave model.objective or parallel.cp out",
        )
    if job.train.compile:
        raise LayoutError(
            "parallel.cp sends keys and values from inside of attention, which train.compile cannot"
            " compile",
            fix="set train.compile=false",
        )
    if job.parallel.compress != "none":
        raise LayoutError(
            f"parallel.compress={job.parallel.compress} is for ddp alone, and the job has context"
            " parallelism",
            fix="set parallel.cp=1, or parallel.compress=none",
        )
    chunks = cp * (2 if choose_load_balance(job).value == "zigzag" else 1)
    if job.data.seq_len % chunks:
        raise LayoutError(
            f"parallel.cp {cp} cuts a sequence into {chunks} chunks, which do not divide"
            f" data.seq_len {job.data.seq_len}",
            fix=f"nearest seq_len: {multiples_near(job.data.seq_len, chunks)}",
        )
    if job.parallel.cp_attention == "ulysses" and shape.heads is not None:
        _require_heads(cp, shape.heads, tp)
    return cp


def no_attention_seam_error(model: str) -> LayoutError:
    return LayoutError(
        f"parallel.cp needs a model whose attention can be swapped, and {model} has no such seam",
        fix="leave parallel.cp out, or see docs/context-parallel.md for the seam",
    )


def _require_heads(cp: int, of_model: Heads, tp: int) -> None:
    heads, kv_heads = of_model.queries // tp, max(1, of_model.keys // tp)
    if heads % cp == 0 and kv_heads % cp == 0:
        return
    of = f" on each of the {tp} ranks of tp" if tp > 1 else ""
    legal = [d for d in divisors(kv_heads) if d > 1]
    raise LayoutError(
        f"parallel.cp {cp} does not divide {describe_heads(heads, kv_heads)}{of}, as ulysses needs",
        fix=(f"nearest: {nearest(cp, legal)}, or " if legal else "set ")
        + "parallel.cp_attention=ring",
    )


def expert_parallel_degree(job: Job, shape: ModelCosts, num_ranks: int) -> int:
    """The degree of ep.

    Raises LayoutError for what it cannot do, naming the nearest that it can.
    """
    ep = job.parallel.degrees.ep
    if ep == 1:
        return 1
    size, description = find_ranks_for_experts(job, num_ranks) or (
        num_ranks,
        f"the {num_ranks} ranks",
    )
    wrong = find_misfit(ep, shape, size)
    if wrong is not None:
        raise LayoutError(f"parallel.{wrong[0]}", fix=wrong[1])
    for finding in experts_have_no_conflicts.run(job):
        raise LayoutError(f"{'.'.join(map(str, finding.path))}: {finding.what}", fix=finding.fix)
    if size % ep:
        problem, fix = explain_undivided(job, shape, size, description)
        raise LayoutError(f"parallel.{problem}", fix=fix)
    return ep


def require_whole_model(job: Job, ranks: int) -> None:
    """Raises LayoutError where gradients are to be compressed that DDP does not reduce."""
    parallel = job.parallel
    if parallel.compress != "none" and parallel.degrees.tp > 1:
        raise LayoutError(
            f"parallel.compress={parallel.compress} is for ddp, and the job has tensor parallelism",
            why="ranks that hold a weight alike would have to keep the same error of it",
            fix="set parallel.tp=1, or parallel.compress=none",
        )
    sharded = (
        parallel.degrees.dp_shard > 1
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
