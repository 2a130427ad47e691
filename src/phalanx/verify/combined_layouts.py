"""The layouts in which several axes meet, and those of experts, by name. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NamedLayouts = Iterator[tuple[str, dict[str, Any]]]
EXPERT_KEYS = ("ep",)
# What the names of layouts end with that have several options of data parallelism.
OPTIONS_SUFFIX = "-options"
_OPTIONS_OF_SHARDS: dict[str, Any] = {
    "zero_stage": 3,
    "keep_whole_below": 64,
    "prefetch": 1,
    "blocks_per_unit": 2,
}


def list_option_layouts(num_ranks: int) -> NamedLayouts:
    """The options of data parallelism beside tp and in a pipeline, as many at a time as go
    together. Compression goes with no other axis, sharded accumulation and parameters on the host
    with no pipeline."""
    rest = num_ranks // 2
    if num_ranks % 2 or rest < 2:
        return
    shards = {"dp_shard": rest, **_OPTIONS_OF_SHARDS}
    on_host = {"accumulate": "sharded", "offload": "parameters"}
    replicas = {"dp_replicate": rest, "offload": "optimizer"}
    pp = {"pp": 2, "schedule": "1f1b"}
    yield f"zero3-tp2{OPTIONS_SUFFIX}", {**shards, **on_host, "tp": 2}
    yield f"ddp-tp2{OPTIONS_SUFFIX}", {**replicas, "static_graph": True, "tp": 2}
    yield f"pp2-zero3{OPTIONS_SUFFIX}", {**pp, **shards, "offload": "optimizer"}
    split = {**pp, "schedule": "zb-v"}
    yield f"pp2-ddp{OPTIONS_SUFFIX}", {**split, **replicas, "unused_parameters": "allow"}


def list_three_axis_layouts(num_ranks: int) -> NamedLayouts:
    """Three axes on eight ranks and more: what there is of other layouts has two, or is in
    `verify.pipelines`."""
    if num_ranks % 8:
        return
    shards = num_ranks // 4
    zero3, tp, cp = {"dp_shard": shards, "zero_stage": 3}, {"tp": 2}, {"cp": 2}
    yield f"hsdp2x{shards * 2}-zero3-cp2", {"dp_replicate": 2, **zero3, **cp}
    yield "ddp-tp2-cp2", {"dp_replicate": shards, **tp, **cp}
    yield "zero3-tp2-cp2", {**zero3, **tp, **cp}
    yield "zero3-tp2-cp2-all-gather", {**zero3, **tp, **cp, "cp_attention": "all-gather"}
    for schedule in ("1f1b", "zb-v"):
        pp = {"pp": 2, "schedule": schedule}
        yield f"pp2-ddp-tp2-{schedule}", {**pp, "dp_replicate": shards, **tp}
        yield f"pp2-zero3-cp2-{schedule}", {**pp, **zero3, **cp}
        if shards == 2:
            yield f"pp2-tp2-cp2-{schedule}", {**pp, **tp, **cp}


def list_expert_layouts(num_ranks: int) -> NamedLayouts:
    """Experts spread over the ranks of data parallelism, and of cp; alone and beside each other
    axis."""
    for ep in _list_divisors(num_ranks):
        yield f"zero3-ep{ep}", _build_zero3_keys(num_ranks) | {"ep": ep}
    if num_ranks == 1:
        return
    everywhere = {"ep": num_ranks}
    # The simplest that fits: copies of all but experts.
    yield f"ddp-ep{num_ranks}", everywhere
    yield f"zero2-ep{num_ranks}", {"dp_shard": num_ranks, "zero_stage": 2} | everywhere
    for how in ("full", "selective", "sqrt"):
        yield (
            f"zero3-ep{num_ranks}-{how}",
            _build_zero3_keys(num_ranks) | everywhere | {"train.recompute": how},
        )
    yield f"cp{num_ranks}-ep{num_ranks}", {"cp": num_ranks} | everywhere
    if num_ranks % 2 or num_ranks == 2:
        return
    half = num_ranks // 2
    yield (
        f"zero3-ep{half}{OPTIONS_SUFFIX}",
        {"dp_shard": num_ranks, **_OPTIONS_OF_SHARDS, "accumulate": "sharded", "ep": half},
    )
    yield f"ddp-ep{half}", {"ep": half}
    yield f"hsdp2x{half}-zero3-ep{half}", {"dp_replicate": 2, **_build_zero3_keys(half), "ep": half}
    yield f"zero3-tp2-ep{half}", {**_build_zero3_keys(half), "tp": 2, "ep": half}
    yield (
        f"zero3-tp2-whole-sequence-ep{half}",
        {**_build_zero3_keys(half), "tp": 2, "sequence_parallel": False, "ep": half},
    )
    yield f"tp2-cp{half}-ep{half}", {"tp": 2, "cp": half, "ep": half}
    yield "zero3-cp2-ep2", {**_build_zero3_keys(half), "cp": 2, "ep": 2}
    yield f"zero3-cp2-ep{num_ranks}", {**_build_zero3_keys(half), "cp": 2} | everywhere
    yield "ddp-cp2-ep2", {"dp_replicate": half, "cp": 2, "ep": 2}
    for schedule in ("1f1b", "interleaved-zero-bubble", "zb-v", "dualpipe-v"):
        yield (
            f"pp2-zero3-ep{half}-{schedule}",
            {"pp": 2, "schedule": schedule, **_build_zero3_keys(half), "ep": half},
        )
    yield f"pp2-ddp-ep{half}-zb-v", {"pp": 2, "schedule": "zb-v", "ep": half}
    full = {"train.recompute": "full"}
    yield (
        f"pp2-zero3-ep{half}-full-1f1b",
        {"pp": 2, "schedule": "1f1b", **_build_zero3_keys(half), "ep": half} | full,
    )
    yield from _list_three_axis_expert_layouts(num_ranks)


def _list_three_axis_expert_layouts(num_ranks: int) -> NamedLayouts:
    if num_ranks % 8:
        return
    shards = num_ranks // 4
    over_both = 2 * shards
    for schedule in ("1f1b", "zb-v"):
        pp = {"pp": 2, "schedule": schedule, **_build_zero3_keys(shards)}
        yield f"pp2-zero3-tp2-ep{shards}-{schedule}", pp | {"tp": 2, "ep": shards}
        yield f"pp2-zero3-cp2-ep{over_both}-{schedule}", pp | {"cp": 2, "ep": over_both}
    yield (
        f"zero3-tp2-cp2-ep{over_both}",
        {**_build_zero3_keys(shards), "tp": 2, "cp": 2, "ep": over_both},
    )
    yield (
        f"hsdp2x{over_both}-zero3-cp2-ep{over_both}",
        {"dp_replicate": 2, **_build_zero3_keys(shards), "cp": 2, "ep": over_both},
    )
    yield (
        f"hsdp2x{shards}-zero3-tp2-ep{shards}",
        {"dp_replicate": 2, **_build_zero3_keys(shards), "tp": 2, "ep": shards},
    )
    pp = {"pp": 2, "schedule": "1f1b", "dp_replicate": 2}
    yield (
        f"pp2-hsdp2x{shards}-zero3-ep{shards}-1f1b",
        {**pp, **_build_zero3_keys(shards), "ep": shards},
    )


def _build_zero3_keys(shards: int) -> dict[str, Any]:
    return {"dp_shard": shards, "zero_stage": 3}


def _list_divisors(number: int) -> list[int]:
    return [d for d in range(2, number + 1) if number % d == 0]
