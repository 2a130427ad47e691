"""From rows to fits: which constants each kind of operation has, and what bounds them.

Torch-free. The bounds are what hardware can do: a data sheet's where the GPU is known, otherwise
what no machine exceeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from phalanx.bench.fits import ConstantRange, FitResult, Predict, fit_constants
from phalanx.bench.loss_and_block_fits import FitKey, fit_losses_and_blocks, make_fitted_rate
from phalanx.plan.accelerators import GB, Accelerator, list_accelerators
from phalanx.plan.cluster import Cluster
from phalanx.plan.profiles import (
    MAX_QUIET_BUSY_SHARE,
    PROCESSOR,
    FittedRate,
    TimedOperation,
    evaluate_linear_fit,
    evaluate_matmul_fit,
)

# FLOP of one core in a second: 64 (two AVX-512 units, multiply and add, fp32) at 6 GHz; a matrix
# unit (AMX) does 16 times as many in bf16.
CORE_FLOPS_PER_S = {"fp32": 64 * 6e9, "bf16": 1024 * 6e9}
# Memory of no CPU moves more in a second.
CPU_MEMORY_PER_S = 2000 * GB
# Calling an operation.
OVERHEAD_RANGE = ConstantRange(2e-7, 2e-3, 5e-6)
# Of a collective: from a kernel on one GPU to threads that take turns on a busy core.
LATENCY_RANGE = ConstantRange(1e-6, 0.2, 1e-4)
HALF_SPEED_RANGE = ConstantRange(0.25, 4096.0, 8.0)

KERNELS_BY_FLOPS = ("attention",)
KERNELS_BY_BYTES = (
    "copy",
    "host_to_device",
    "device_to_host",
    "add",
    "rms_norm",
    "gated_activation",
    "rotary",
    "embedding",
    "adamw",
    "write",
    "sync",
    "read",
    "small_write",
    "small_read",
)
COLLECTIVE_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
# Of fewer measurements nothing can be said.
MIN_POINTS_OF_KIND = {"matmul": 3, "launch": 1}


def choose_clock_basis(cluster: Cluster, busy_share: float) -> str:
    """ "wall", or "processor" on a CPU that others were using, too.

    There the clock on the wall measures whose turn it is. Processor seconds are still a rank's own;
    what waits for other ranks or for a disk has the fastest tenth of its repeats instead.
    """
    if cluster.device == "cpu" and busy_share > MAX_QUIET_BUSY_SHARE:
        return PROCESSOR
    return "wall"


def _get_seconds_by_basis(row: TimedOperation, basis: str) -> float:
    if basis == "wall":
        return row.seconds
    waits = row.kind in COLLECTIVE_KINDS or row.kind == "overlap" or row.num_threads > 1
    # Threads that wait for each other spend processor seconds on it.
    if waits or row.cpu_s <= 0:
        return row.low_s
    return row.cpu_s


def _list_collectives_by_processor_time(rows: Sequence[TimedOperation]) -> list[TimedOperation]:
    """Collectives again, with the processor seconds that they take of a rank."""
    spent = []
    for row in rows:
        if row.kind in COLLECTIVE_KINDS and row.cpu_s > 0:
            spent.append(replace(row, mode=PROCESSOR, seconds=row.cpu_s))
    return spent


def fit_section(
    rows: Sequence[TimedOperation], cluster: Cluster, basis: str = "wall"
) -> tuple[FittedRate, ...]:
    """The fits of all kinds of operations in `rows`, each for itself: by kind, mode, type, number
    of ranks and of threads. `basis`: see `choose_clock_basis`."""
    rows = [
        *_list_collectives_by_processor_time(rows),
        *(replace(r, seconds=_get_seconds_by_basis(r, basis)) for r in rows),
    ]
    groups: dict[FitKey, list[TimedOperation]] = {}
    for row in rows:
        # Three gradients of one product are products: together they say more of its constants.
        mode = row.mode
        if row.kind == "matmul":
            mode = ""
        key = row.kind, mode, row.dtype, row.num_ranks, row.num_threads
        groups.setdefault(key, []).append(row)
    accelerator = find_accelerator_by_device_name(cluster.name, cluster.memory_bytes / 2**30)
    fits = []
    for key, group in groups.items():
        result = _fit_rate_of_group(key, group, cluster, accelerator)
        if result is None:
            continue
        fits.append(make_fitted_rate(key, result, len(group)))
    fits += fit_losses_and_blocks(groups, fits, cluster)
    fits += _measure_overlap(rows)
    fits += _measure_crowd_slowdown(fits)
    return tuple(fits)


def find_accelerator_by_device_name(name: str, memory_gib: float = 0.0) -> Accelerator | None:
    """The accelerator of the table that a driver's name ("NVIDIA H100 80GB HBM3") means; None for
    another, and for CPUs.

    The model must be in the name. Of several with one model, it is the one with most words in
    common, then with the nearest memory.
    """
    words = name.lower().replace("-", " ").split()
    nearest, least = None, (0, 0.0)
    for accelerator in list_accelerators().values():
        model, *variants = accelerator.name.split("-")
        if model not in words:
            continue
        num_apart = 0
        for variant in variants:
            num_apart += not any(word.startswith(variant) for word in words)
        distance = num_apart, abs(accelerator.memory_gib - memory_gib)
        if nearest is None or distance < least:
            nearest, least = accelerator, distance
    return nearest


def _fit_rate_of_group(
    key: FitKey,
    rows: Sequence[TimedOperation],
    cluster: Cluster,
    accelerator: Accelerator | None,
) -> FitResult | None:
    kind, _, dtype, _, threads = key
    if len(rows) < MIN_POINTS_OF_KIND.get(kind, 2):
        return None
    if kind == "matmul":
        return _fit_matmuls(rows, dtype, threads, cluster, accelerator)
    if kind in KERNELS_BY_FLOPS:
        peak = _get_peak_flops_limit(dtype, threads, cluster, accelerator)
        return _fit_linear_rate(rows, "flops", ConstantRange(1e6, peak, peak / 50), OVERHEAD_RANGE)
    if kind in KERNELS_BY_BYTES:
        memory_per_s = _get_memory_rate_limit(cluster, accelerator)
        # What lies in a cache is moved faster than memory gives it.
        bound = ConstantRange(1e5, 10 * memory_per_s, memory_per_s / 100)
        return _fit_linear_rate(rows, "bytes", bound, OVERHEAD_RANGE)
    if kind in COLLECTIVE_KINDS:
        link_per_s = _get_link_rate_limit(cluster, accelerator)
        return _fit_linear_rate(
            rows, "bytes", ConstantRange(1e5, link_per_s, link_per_s / 100), LATENCY_RANGE
        )
    if kind == "launch":
        middle = sorted(row.seconds for row in rows)[len(rows) // 2]
        return FitResult({"overhead_s": middle}, 0.0, 0.0)
    return None


def _fit_matmuls(
    rows: Sequence[TimedOperation],
    dtype: str,
    threads: int,
    cluster: Cluster,
    accelerator: Accelerator | None,
) -> FitResult:
    peak = _get_peak_flops_limit(dtype, threads, cluster, accelerator)
    fastest = max(row.flops / row.seconds for row in rows)
    bounds = {
        "overhead_s": OVERHEAD_RANGE,
        "flops_per_s": ConstantRange(1e6, peak, min(peak, 1.1 * fastest)),
        "rows_half": HALF_SPEED_RANGE,
        "cols_half": HALF_SPEED_RANGE,
        "inner_half": HALF_SPEED_RANGE,
    }
    points = [(tuple(float(each) for each in row.size), row.seconds) for row in rows]
    return fit_constants(lambda values, size: evaluate_matmul_fit(values, *size), bounds, points)


def _fit_linear_rate(
    rows: Sequence[TimedOperation], amount: str, per_s: ConstantRange, overhead: ConstantRange
) -> FitResult:
    """Seconds as an overhead and so much for each byte or FLOP."""
    points = []
    for row in rows:
        size = row.num_bytes
        if amount == "flops":
            size = row.flops
        points.append(((size,), row.seconds))
    predict: Predict = lambda values, size: evaluate_linear_fit(values, size[0])  # noqa: E731
    return fit_constants(predict, {"overhead_s": overhead, "per_s": per_s}, points)


def _get_peak_flops_limit(
    dtype: str, threads: int, cluster: Cluster, accelerator: Accelerator | None
) -> float:
    """FLOP/s that a rank cannot exceed."""
    if cluster.device == "cpu":
        return threads * CORE_FLOPS_PER_S.get(dtype, CORE_FLOPS_PER_S["bf16"])
    if accelerator is not None and dtype != "fp32":
        return accelerator.peak_flops(dtype)
    # fp32 products, where TF32 is on, run at half of bf16's rate; an unknown GPU: above all known.
    peaks = [each.peak_flops("fp8") for each in list_accelerators().values()]
    return max(peaks)


def _get_memory_rate_limit(cluster: Cluster, accelerator: Accelerator | None) -> float:
    if cluster.device == "cpu":
        return CPU_MEMORY_PER_S
    if accelerator is not None:
        return accelerator.memory_gb_s * GB
    return max(each.memory_gb_s for each in list_accelerators().values()) * GB


def _get_link_rate_limit(cluster: Cluster, accelerator: Accelerator | None) -> float:
    """Bytes of a message in a second that no collective exceeds: those of a copy in memory, or two
    link bandwidths, as a switch that adds up gives."""
    if cluster.device == "cpu":
        return CPU_MEMORY_PER_S / 4
    if accelerator is not None:
        return 2 * accelerator.link_gb_s * GB
    return 2 * max(each.link_gb_s for each in list_accelerators().values()) * GB


def _measure_overlap(rows: Sequence[TimedOperation]) -> list[FittedRate]:
    """The share of an all-reduce that is hidden behind products beside it: 1 all, 0 nothing, below
    0 both are slower together than one after the other.

    By number of ranks: the median over messages of (compute + message - both) / the shorter one.
    """
    times: dict[tuple[int, int, tuple[int, ...]], dict[str, float]] = {}
    for row in rows:
        if row.kind == "overlap":
            key = row.num_ranks, row.num_threads, row.size
            times.setdefault(key, {})[row.mode] = row.seconds
    hidden: dict[tuple[int, int], list[float]] = {}
    for (num_ranks, threads, _), modes in times.items():
        if len(modes) < 3:
            continue
        shorter = min(modes["compute"], modes["all_reduce"])
        saved = modes["compute"] + modes["all_reduce"] - modes["together"]
        hidden.setdefault((num_ranks, threads), []).append(saved / shorter)
    fits = []
    for (num_ranks, threads), shares in hidden.items():
        shares.sort()
        middle = shares[len(shares) // 2]
        spread = max(abs(share - middle) for share in shares)
        values = {"hidden_share": max(-1.0, min(1.0, middle))}
        fits.append(
            FittedRate(
                "overlap", "", "fp32", num_ranks, threads, values, spread, spread, len(shares)
            )
        )
    return fits


def _measure_crowd_slowdown(fits: Sequence[FittedRate]) -> list[FittedRate]:
    """The slowdown of ranks that compute at once: the rate of products of one rank alone over
    its rate among them, with the same number of threads."""
    rates: Mapping[tuple[str, int, int], FittedRate] = {
        (fit.dtype, fit.num_ranks, fit.num_threads): fit for fit in fits if fit.kind == "matmul"
    }
    crowds = []
    for (dtype, num_ranks, threads), fit in rates.items():
        alone = rates.get((dtype, 1, threads))
        if num_ranks == 1 or alone is None:
            continue
        slowdown = alone.values["flops_per_s"] / fit.values["flops_per_s"]
        values = {"slowdown": slowdown}
        crowds.append(FittedRate("crowd", "", dtype, num_ranks, threads, values, None, None, 2))
    return crowds
