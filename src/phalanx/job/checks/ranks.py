"""How many ranks there are to be, along which axes, and whether they can share the batch."""

from __future__ import annotations

from phalanx.core.units import plural
from phalanx.job.checks.check import declare_check, make_finding
from phalanx.job.findings import Finding
from phalanx.job.nearest import (
    find_nearest_degrees,
    format_nearest_divisors,
    format_nearest_multiples,
    list_divisors,
)
from phalanx.job.schema import Cluster, Job


@declare_check(
    "parallel.ranks",
    "parallel.dp_replicate",
    "parallel.dp_shard",
    "parallel.pp",
    "parallel.cp",
    "parallel.tp",
)
def check_axes_fill_ranks(job: Job) -> list[Finding]:
    ranks, copies, shards = job.parallel.ranks, job.parallel.dp_replicate, job.parallel.dp_shard
    shared = job.parallel.degrees.model_parallel_size
    if ranks is None:
        return []
    # First: a remainder here would make nonsense of what is divided below.
    if ranks % shared:
        return [_make_indivisible_ranks_finding(job, ranks)]
    ranks //= shared
    if copies is not None and shards is not None:
        is_filled = copies * shards == ranks
        if copies and shards and leaves_axes_to_search(job):
            is_filled = ranks % (copies * shards) == 0
        if not is_filled:
            return [_make_unfilled_ranks_finding(job, ranks, copies, shards)]
    for name, degree in (("dp_replicate", copies), ("dp_shard", shards)):
        if degree is not None and ranks % degree:
            rest = f"the {plural(ranks, 'rank')}"
            if axes := _describe_model_axes(job):
                rest = f"{plural(ranks, 'rank')}, what {axes} leaves of {ranks * shared}"
            problem = f"{name} {degree} does not divide {rest}"
            return [
                make_finding(
                    f"parallel.{name}",
                    problem,
                    f"nearest: {format_nearest_divisors(ranks, degree)}",
                )
            ]
    return []


def _list_model_axis_degrees(job: Job) -> dict[str, int]:
    """The degrees above 1 of the axes whose ranks work on the same samples."""
    return job.parallel.degrees.degrees_above_one("pp", "cp", "tp")


def _describe_model_axes(job: Job) -> str:
    """These axes in words: "pp 2 x tp 4"."""
    return " x ".join(f"{axis} {degree}" for axis, degree in _list_model_axis_degrees(job).items())


def _make_unfilled_ranks_finding(job: Job, ranks: int, copies: int, shards: int) -> Finding:
    """The finding of copies and shards that do not make the `ranks` that model axes leave."""
    shared = job.parallel.degrees.model_parallel_size
    pairs = [(degree, ranks // degree) for degree in list_divisors(ranks)]
    # Both degrees move: the pair of divisors whose sum of changes is least.
    best = min(pairs, key=lambda pair: abs(pair[0] - copies) + abs(pair[1] - shards))
    product = copies * shards * shared
    problem = f"dp_replicate {copies} x dp_shard {shards}"
    if axes := _describe_model_axes(job):
        problem += f" x {axes}"
    problem += f" makes {product} ranks, and parallel.ranks is {ranks * shared}"
    fix = f"nearest: dp_replicate {best[0]} x dp_shard {best[1]}, or ranks {product}"
    return make_finding("parallel.ranks", problem, fix)


def _make_indivisible_ranks_finding(job: Job, ranks: int) -> Finding:
    axes = _list_model_axis_degrees(job)
    if len(axes) == 1:
        ((axis, degree),) = axes.items()
        problem = f"{axis} {degree} does not divide the {plural(ranks, 'rank')}"
        return make_finding(
            f"parallel.{axis}", problem, f"nearest {axis}: {format_nearest_divisors(ranks, degree)}"
        )
    problem = f"{_describe_model_axes(job)} = {job.parallel.degrees.model_parallel_size}"
    legal = find_nearest_degrees(ranks, axes, must_fill=False)
    fix = f"nearest: {' x '.join(f'{axis}={degree}' for axis, degree in legal.items())}"
    return make_finding(
        f"parallel.{next(iter(axes))}",
        f"{problem} does not divide the {plural(ranks, 'rank')}",
        fix,
    )


@declare_check("train.global_batch_size", "train.micro_batch_size")
def check_micro_batch_divides_global(job: Job) -> list[Finding]:
    batch, micro = job.train.global_batch_size, job.train.micro_batch_size
    if micro is None or batch % micro == 0:
        return []
    problem = f"micro-batches of {micro} do not divide the global batch of {batch} sequences"
    fix = f"nearest micro_batch_size: {format_nearest_divisors(batch, micro)}"
    return [make_finding("train.micro_batch_size", problem, fix)]


@declare_check(
    "train.global_batch_size",
    "train.micro_batch_size",
    "parallel.ranks",
    "parallel.dp_replicate",
    "parallel.dp_shard",
    "parallel.pp",
    "parallel.cp",
    "parallel.tp",
)
def check_ranks_divide_batch(job: Job) -> list[Finding]:
    # Left open, microbatches of one sample can be: no share is refused for their size.
    batch, micro = job.train.global_batch_size, job.train.micro_batch_size or 1
    known, shared = find_num_ranks(job), job.parallel.degrees.model_parallel_size
    if known is None or known % shared or leaves_axes_to_search(job):
        return []
    ranks = known // shared
    # A microbatch that does not divide the batch has its own finding.
    if batch % micro or batch % (ranks * micro) == 0:
        return []
    parts = ""
    if micro > 1:
        parts = f" in micro-batches of {micro}"
    problem = (
        f"a global batch of {batch} sequences cannot be shared evenly by"
        f" {plural(ranks, 'rank')}{parts}"
    )
    fix = f"nearest global_batch_size: {format_nearest_multiples(batch, ranks * micro)}; or ranks: "
    return [
        make_finding(
            "train.global_batch_size", problem, fix + format_nearest_divisors(batch // micro, ranks)
        )
    ]


@declare_check("parallel.tp", "parallel.tp_chunks", "parallel.sequence_parallel")
def check_tensor_parallel_keys_are_read(job: Job) -> list[Finding]:
    if job.parallel.degrees.tp > 1:
        return []
    wishes = {
        "tp_chunks": job.parallel.tp_chunks > 1,
        "sequence_parallel": job.parallel.sequence_parallel is True,
    }
    problem, fix = (
        "is for tensor parallelism, and parallel.tp is 1",
        "set parallel.tp, or remove it",
    )
    return [make_finding(f"parallel.{key}", problem, fix) for key, wish in wishes.items() if wish]


@declare_check("parallel.cp", "parallel.cp_attention", "parallel.cp_load_balance")
def check_context_parallel_keys_are_read(job: Job) -> list[Finding]:
    if job.parallel.degrees.cp > 1:
        return []
    wishes = {"cp_attention": job.parallel.cp_attention != "ring"}
    wishes["cp_load_balance"] = job.parallel.cp_load_balance != "zigzag"
    problem, fix = (
        "is for context parallelism, and parallel.cp is 1",
        "set parallel.cp, or remove it",
    )
    return [make_finding(f"parallel.{key}", problem, fix) for key, wish in wishes.items() if wish]


@declare_check(
    "parallel.ranks",
    "parallel.dp_replicate",
    "parallel.dp_shard",
    "parallel.compress",
    asked_by=("parallel.ranks",),
)
def check_compression_has_two_ranks(job: Job) -> list[Finding]:
    compress = job.parallel.compress
    if compress == "none" or find_num_ranks(job) != 1:
        return []
    problem = f"gradients travel as {compress} between ranks, and there is one"
    return [
        make_finding("parallel.compress", problem, "set parallel.ranks=2 or more, or remove it")
    ]


@declare_check(
    "resilience.min_ranks",
    "parallel.ranks",
    "parallel.dp_replicate",
    "parallel.dp_shard",
    "parallel.pp",
    "parallel.cp",
    "parallel.tp",
    asked_by=("resilience.min_ranks",),
)
def check_min_ranks_are_there(job: Job) -> list[Finding]:
    ranks, least = find_num_ranks(job), job.resilience.min_ranks
    if ranks is None or least is None or least <= ranks:
        return []
    problem = f"wanted at most the {plural(ranks, 'rank')} of the job, was given {least}"
    fix = f"set it to {ranks} or less, or parallel.ranks to {least} or more"
    return [make_finding("resilience.min_ranks", problem, fix)]


CHECKS = (
    check_min_ranks_are_there,
    check_tensor_parallel_keys_are_read,
    check_context_parallel_keys_are_read,
    check_compression_has_two_ranks,
    check_axes_fill_ranks,
    check_micro_batch_divides_global,
    check_ranks_divide_batch,
)


def leaves_axes_to_search(job: Job) -> bool:
    """True if the plan chooses axes whose ranks share samples: it has a cluster to choose for, and
    the job leaves some of them open."""
    degrees = (job.parallel.tp, job.parallel.pp, job.parallel.cp)
    return job.cluster.has_described_machine and None in degrees


def find_problems_of_stated_axes(job: Job) -> list[Finding]:
    """Problems of ranks and batch where no plan chooses the axes that the job leaves open:
    it runs with those that it states. Empty where the job's own checks have looked already."""
    if not leaves_axes_to_search(job):
        return []
    stated = job.model_copy(update={"cluster": Cluster()})
    return [
        finding
        for check in (check_axes_fill_ranks, check_ranks_divide_batch)
        for finding in check.run(stated)
    ]


def find_num_ranks(job: Job) -> int | None:
    """The number of ranks, if the job alone decides it; else None."""
    parallel = job.parallel
    if (
        parallel.ranks is None
        and parallel.dp_replicate is not None
        and parallel.dp_shard is not None
    ):
        return parallel.dp_replicate * parallel.dp_shard * parallel.degrees.model_parallel_size
    return parallel.ranks
