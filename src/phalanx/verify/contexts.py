"""The layouts with context parallelism that a model is judged in, by name. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from phalanx.job.schema import Parallel

CONTEXT_KEYS = ("cp", "cp_attention", "cp_load_balance")

NamedLayouts = Iterator[tuple[str, dict[str, Any]]]
_CP_ATTENTION_KINDS = get_args(Parallel.model_fields["cp_attention"].annotation)


def list_context_parallel_layouts(num_ranks: int) -> NamedLayouts:
    """Each way to attend, alone and beside each other axis that two ranks leave room for; and other
    ways of cutting sequences, of sharding and of keeping less."""
    for cp in (d for d in range(2, num_ranks + 1) if num_ranks % d == 0):
        for prefix, axes in _iterate_axes_beside_cp(num_ranks // cp):
            for kind in _CP_ATTENTION_KINDS:
                suffix = "" if kind == "ring" else f"-{kind}"
                yield f"{prefix}cp{cp}{suffix}", {"cp": cp, "cp_attention": kind} | axes
    if num_ranks > 1:
        yield from _list_cp_variants(num_ranks)


def _iterate_axes_beside_cp(rest: int) -> NamedLayouts:
    if rest == 1:
        yield "", {}
        return
    yield "ddp-", {"dp_replicate": rest}
    yield "zero3-", {"dp_shard": rest, "zero_stage": 3}
    yield f"tp{rest}-", {"tp": rest}


def _list_cp_variants(num_ranks: int) -> NamedLayouts:
    """Sequences cut into one run, shards over cp alone and over copies of them, recomputation."""
    cp = {"cp": num_ranks}
    yield f"cp{num_ranks}-one-run", cp | {"cp_load_balance": "none"}
    yield (
        f"cp{num_ranks}-one-run-all-gather",
        cp | {"cp_load_balance": "none", "cp_attention": "all-gather"},
    )
    for stage in (1, 2, 3):
        yield f"cp{num_ranks}-zero{stage}", cp | {"zero_stage": stage}
    for how in ("full", "selective", "sqrt"):
        yield f"cp{num_ranks}-{how}", cp | {"train.recompute": how}
    if num_ranks % 2 == 0 and num_ranks > 2:
        half = num_ranks // 2
        for stage in (1, 3):
            yield (
                f"hsdp{half}x2-zero{stage}-cp2",
                {"dp_replicate": half, "dp_shard": 1, "cp": 2, "zero_stage": stage},
            )
        yield f"tp{half}-whole-sequence-cp2", {"cp": 2, "tp": half, "sequence_parallel": False}
        yield (
            f"zero3-accumulate-cp{half}",
            {"dp_shard": 2, "zero_stage": 3, "accumulate": "sharded", "cp": half}
            | {"keep_whole_below": 64, "prefetch": 1, "offload": "optimizer"},
        )
