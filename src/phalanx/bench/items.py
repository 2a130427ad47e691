"""What is measured, in which order and for how long. Torch-free: ranks get it as data."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.core.typed_json import JsonRecord
from phalanx.plan.cluster import Cluster

KIB, MIB = 2**10, 2**20
# Of everything on one machine, without the seconds in which torch is imported.
SECTION_BUDGET_S = {"gemm": 34.0, "comm": 20.0, "storage": 8.0}
QUICK_SECTION_BUDGET_S = {"gemm": 2.0, "comm": 1.5, "storage": 0.5}
# Nothing is repeated for a shorter time than this, however many operations there are.
MIN_ITEM_S = 0.01
MAX_BENCH_RANKS = 8

KERNEL_MODES = ("forward", "training")
MATMUL_MODES = ("forward", "input_grad", "weight_grad")
COLLECTIVE_NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


@dataclass(frozen=True)
class BenchItem(JsonRecord):
    """One operation to measure, by `num_ranks` at once with `num_threads` each, for about
    `budget_s` seconds. `weight`: of the section's seconds, beside the other items'."""

    section: str
    kind: str
    mode: str
    dtype: str
    size: tuple[int, ...]
    num_ranks: int
    num_threads: int
    weight: float = 1.0
    budget_s: float = 0.0


@dataclass(frozen=True)
class BenchPayload(JsonRecord):
    """The items that `num_ranks` ranks measure together; rank 0 writes rows into `run_dir`.

    What is not begun `limits_s` after its section's first item is left out.
    """

    run_dir: Path
    num_ranks: int
    device: str
    limits_s: dict[str, float]
    items: tuple[BenchItem, ...]
    collectives: str = "auto"


def list_group_sizes(cluster: Cluster, requested: int | None = None) -> tuple[int, ...]:
    """The numbers of ranks that are measured together: powers of two up to the devices.

    A CPU is measured with at least 4 ranks, as small machines are trained on with more ranks than
    cores, and with at most MAX_BENCH_RANKS.
    """
    largest = cluster.num_devices
    if cluster.device == "cpu":
        largest = max(4, min(MAX_BENCH_RANKS, cluster.num_devices))
    if requested is not None:
        largest = requested
    sizes = []
    size = 2
    while size < largest:
        sizes.append(size)
        size *= 2
    if largest > 1:
        sizes.append(largest)
    return tuple(sizes)


def count_threads_per_rank(cluster: Cluster, num_ranks: int) -> int:
    """Threads of each of `num_ranks` ranks, as `phalanx train` gives them."""
    if cluster.device != "cpu":
        return 1
    return max(1, cluster.num_devices // num_ranks)


def list_bench_items(
    cluster: Cluster,
    sections: Sequence[str],
    sizes: Sequence[int],
    *,
    is_quick: bool = False,
    total_s: float | None = None,
    only_single_threads: bool = False,
) -> tuple[BenchItem, ...]:
    """Everything that ranks measure for `sections`, with the seconds of each item: in all
    `total_s`, or as SECTION_BUDGET_S says. `only_single_threads`: without what a rank computes with
    several threads, where any is computed with one."""
    items: list[BenchItem] = []
    seconds = dict(QUICK_SECTION_BUDGET_S if is_quick else SECTION_BUDGET_S)
    if total_s is not None:
        factor = total_s / sum(seconds[name] for name in ("gemm", "comm") if name in sections)
        seconds = {name: factor * usual_s for name, usual_s in seconds.items()}
    if "gemm" in sections:
        computed = list(_list_compute_items(cluster, sizes, is_quick))
        if only_single_threads:
            single = [item for item in computed if item.num_threads == 1]
            computed = single or computed
        items += _divide_budget_among_items(computed, seconds["gemm"])
    if "comm" in sections:
        items += _divide_budget_among_items(
            list(_list_collective_items(cluster, sizes, is_quick)), seconds["comm"]
        )
    return tuple(items)


def _divide_budget_among_items(items: list[BenchItem], seconds: float) -> list[BenchItem]:
    # In any order: what disturbs the machine for a second hits no kind of operation alone, and
    # what there is no time for is none alone either.
    random.Random(0).shuffle(items)
    total = sum(item.weight for item in items)
    shared = []
    for item in items:
        budget_s = max(MIN_ITEM_S, seconds * item.weight / total)
        shared.append(replace(item, budget_s=budget_s))
    return shared


def list_matmul_dtypes(cluster: Cluster) -> tuple[str, ...]:
    """The types whose products are measured; CPUs compute fp16 by emulation, and nobody trains
    with it there."""
    if cluster.device == "cpu":
        return ("fp32", "bf16")
    # fp8 products begin with compute capability 8.9.
    if cluster.capability is not None and cluster.capability >= (8, 9):
        return ("fp32", "bf16", "fp16", "fp8")
    return ("fp32", "bf16", "fp16")


# Rows (tokens), columns and inner dimension: a coarse log grid, with the shapes of a decoder's
# products (square, wide, narrow, few tokens) in it.
CPU_MATMUL_SHAPES = (
    (16, 256, 256),
    (64, 64, 64),
    (64, 1024, 256),
    (128, 128, 512),
    (128, 512, 512),
    (256, 256, 64),
    (256, 256, 1024),
    (256, 1024, 1024),
    (512, 64, 256),
    (512, 768, 768),
    (512, 4096, 256),
    (1024, 256, 256),
    (1024, 512, 2048),
    (2048, 256, 512),
)
GPU_MATMUL_SHAPES = (
    (256, 1024, 1024),
    (256, 4096, 4096),
    (512, 2048, 2048),
    (1024, 1024, 4096),
    (1024, 8192, 8192),
    (2048, 2048, 2048),
    (2048, 4096, 1024),
    (2048, 32768, 4096),
    (4096, 1024, 4096),
    (4096, 4096, 4096),
    (4096, 14336, 4096),
    (8192, 2048, 8192),
    (8192, 8192, 8192),
    (16384, 4096, 4096),
)
QUICK_MATMUL_SHAPES = ((64, 256, 256), (256, 256, 1024), (512, 512, 256))


def _list_compute_items(
    cluster: Cluster, sizes: Sequence[int], is_quick: bool
) -> Iterator[BenchItem]:
    """Products and kernels: all of them by one rank alone and by as many as the machine has
    devices, and some by the other numbers of ranks."""
    full = max([size for size in sizes if size <= cluster.num_devices], default=1)
    for num_ranks in (1, *sizes):
        threads = count_threads_per_rank(cluster, num_ranks)
        item = BenchItem("gemm", "", "", "", (), num_ranks, threads)
        is_full = num_ranks in (1, full)
        yield from _list_matmul_items(item, cluster, is_full=is_full, is_quick=is_quick)
        if is_full:
            yield from _list_kernel_items(item, cluster, is_quick)
    if full > 1:
        # One rank with the threads that it has among others: what these cost it.
        alone = BenchItem("gemm", "", "", "", (), 1, count_threads_per_rank(cluster, full))
        if alone.num_threads != count_threads_per_rank(cluster, 1):
            yield from _list_matmul_items(alone, cluster, is_full=False, is_quick=is_quick)


def _list_matmul_items(
    item: BenchItem, cluster: Cluster, *, is_full: bool, is_quick: bool
) -> Iterator[BenchItem]:
    shapes: Sequence[tuple[int, int, int]] = CPU_MATMUL_SHAPES
    if cluster.device != "cpu":
        shapes = GPU_MATMUL_SHAPES
    if not is_full:
        shapes = shapes[4::4]
    if is_quick:
        shapes = QUICK_MATMUL_SHAPES
    for dtype in list_matmul_dtypes(cluster):
        for number, shape in enumerate(shapes):
            # One of the three products of a linear layer each: they are fitted together. Gradients
            # in fp8 are products of other types, in the same layout.
            mode = MATMUL_MODES[number % len(MATMUL_MODES)]
            if dtype == "fp8":
                mode = MATMUL_MODES[0]
            yield replace(item, kind="matmul", mode=mode, dtype=dtype, size=shape)


def _list_kernel_items(item: BenchItem, cluster: Cluster, is_quick: bool) -> Iterator[BenchItem]:
    scale = 8
    if cluster.device == "cpu":
        scale = 1
    for num_bytes in (256 * KIB, 4 * MIB, 48 * MIB):
        yield replace(item, kind="copy", dtype="fp32", size=(num_bytes * scale,))
    for dtype in ("fp32", "bf16"):
        yield from _list_elementwise_items(item, dtype, scale, is_quick)
        yield from _list_attention_items(item, dtype, scale, is_quick)
        yield from _list_embedding_loss_and_block_items(item, dtype, scale, is_quick)
    for count in (2**14, 2**20, 2**23):
        yield replace(item, kind="adamw", dtype="fp32", size=(count * scale,))
    if cluster.device != "cpu":
        for kind in ("host_to_device", "device_to_host"):
            for num_bytes in (MIB, 64 * MIB):
                yield replace(item, kind=kind, dtype="fp32", size=(num_bytes,))


def _list_elementwise_items(
    item: BenchItem, dtype: str, scale: int, is_quick: bool
) -> Iterator[BenchItem]:
    for mode in _choose_modes(item):
        yield replace(item, kind="launch", mode=mode, dtype=dtype)
        for kind in ("add", "rms_norm", "gated_activation", "rotary"):
            for tokens, width in ((128, 256), (1024, 512), (2048, 2048))[: 2 if is_quick else 3]:
                size = (tokens * scale, width)
                yield replace(item, kind=kind, mode=mode, dtype=dtype, size=size)


def _list_embedding_loss_and_block_items(
    item: BenchItem, dtype: str, scale: int, is_quick: bool
) -> Iterator[BenchItem]:
    """Embedding and loss, and whole blocks, which check the rest."""
    item = replace(item, mode="training", dtype=dtype)
    for vocab in (4096, 16384)[: 1 if is_quick else 2]:
        size: tuple[int, ...] = (512 * scale, 64, vocab)
        yield replace(item, kind="cross_entropy", size=size, weight=2.0)
        yield replace(item, kind="embedding", size=(512 * scale, 256, vocab))
    for size in ((256, 128), (512, 256), (1024, 512))[: 1 if is_quick else 3]:
        yield replace(item, kind="block", size=size, weight=3.0)


def _choose_modes(item: BenchItem) -> tuple[str, ...]:
    """Forward and training by ranks that work at once, as they train; of one rank, training."""
    if item.num_ranks == 1:
        return KERNEL_MODES[1:]
    return KERNEL_MODES


def _list_attention_items(
    item: BenchItem, dtype: str, scale: int, is_quick: bool
) -> Iterator[BenchItem]:
    shapes = ((4, 4, 128, 32), (2, 4, 512, 64), (1, 4, 1024, 64))
    for batch, heads, tokens, width in shapes[: 2 if is_quick else 3]:
        for mode in _choose_modes(item):
            size = (batch * scale, heads, tokens, width)
            yield replace(item, kind="attention", mode=mode, dtype=dtype, size=size)


def _list_collective_items(
    cluster: Cluster, sizes: Sequence[int], is_quick: bool
) -> Iterator[BenchItem]:
    byte_counts = [8 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 32 * MIB]
    if cluster.device != "cpu":
        byte_counts += [256 * MIB, 1024 * MIB]
    if is_quick:
        byte_counts = [8 * KIB, 256 * KIB, 2 * MIB]
    for num_ranks in sizes:
        item = BenchItem(
            "comm", "", "", "fp32", (), num_ranks, count_threads_per_rank(cluster, num_ranks)
        )
        for kind in COLLECTIVE_NAMES:
            for size in byte_counts:
                # Large messages need longer for the same number of repeats.
                weight = 1.0 + 3.0 * (size >= 4 * MIB)
                yield replace(item, kind=kind, size=(size,), weight=weight)
        for size in byte_counts[1:-1]:
            for mode in ("compute", "all_reduce", "together"):
                yield replace(item, kind="overlap", mode=mode, size=(size,), weight=1.5)
