"""The setups that a published row may have had: one where it says all, more where it leaves
something out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from phalanx.plan.layout import Layout
from phalanx.plan.timing.setup import Precision, StepSetup
from phalanx.plan.validation.row_stack import (
    build_row_stack,
    is_sequence_parallel,
    parse_row_recompute,
    parse_row_schedule,
)
from phalanx.plan.validation.row_values import (
    UnusableRow,
    get_optional_positive_int,
    get_text,
)
from phalanx.plan.validation.row_zero_stage import list_possible_zero_stages

TRIED_MICRO_BATCH_SIZES = (1, 2, 4, 8)  # those tried where a row does not say
MAX_TRIED_STAGES_PER_RANK = 12  # those tried where a row does not say
# Embedding, head and a block that predicts further ahead may count as blocks when stages are cut.
MAX_EXTRA_BLOCKS = 3
MICROBATCH_KEYS = ("n_microbatches", "micro_batch_count", "grad_accum")


def list_possible_setups(
    row: Mapping[str, Any], num_gpus: int, seq_len: int, precision: Precision, num_layers: int
) -> Iterator[StepSetup]:
    """Every setup that a row's words leave possible."""
    tp, pp, cp = _parse_model_parallel_degrees(row, num_gpus)
    ep = get_optional_positive_int(row, "ep") or 1
    dp = num_gpus // (tp * pp * cp)
    stack = build_row_stack(row)
    for v, micro_batch, (mode, share), (stage, shard) in product(
        _list_stages_per_rank(row, pp, num_layers),
        _list_micro_batch_sizes(row),
        parse_row_recompute(row),
        _list_zero_stages_and_shards(row, dp),
    ):
        count = _count_microbatches(row, dp, micro_batch)
        if count is None:
            continue
        is_folded = ep > 1 and not stack.cuts_experts
        if ep > 1 and not is_folded and (shard * cp) % ep:
            is_folded, stack = True, replace(stack, cuts_experts=False)
        layout = Layout(pp, dp // shard, shard, cp, tp, 1 if is_folded else ep)
        yield StepSetup(
            layout=layout,
            zero_stage=stage,
            micro_batch_size=micro_batch,
            num_microbatches=count,
            seq_len=seq_len,
            precision=precision,
            schedule=parse_row_schedule(row),
            stages_per_rank=v,
            recompute=mode,
            recompute_share=share,
            sequence_parallel=is_sequence_parallel(row, stack),
            cp_attention=_parse_cp_attention(row),
            stack=stack,
            folded_ep=ep if is_folded else 0,
            last_stage_blocks=_count_last_stage_blocks(row, pp, num_layers),
        )


def _parse_model_parallel_degrees(row: Mapping[str, Any], num_gpus: int) -> tuple[int, int, int]:
    """tp, pp and cp, 1 where the row does not say; UnusableRow if it says no layout of
    `num_gpus`."""
    tp, pp = get_optional_positive_int(row, "tp"), get_optional_positive_int(row, "pp")
    if tp is None and pp is None and get_optional_positive_int(row, "dp") != num_gpus:
        raise UnusableRow("no layout")
    tp, pp, cp = tp or 1, pp or 1, get_optional_positive_int(row, "cp") or 1
    if num_gpus % (tp * pp * cp):
        raise UnusableRow("degrees do not divide the GPUs")
    if (get_optional_positive_int(row, "dp") or 0) not in (0, num_gpus // (tp * pp * cp)):
        raise UnusableRow("dp is not the GPUs by tp, pp and cp")
    return tp, pp, cp


def _parse_cp_attention(row: Mapping[str, Any]) -> Any:
    words = f"{get_text(row, 'attention_kernel')} {get_text(row, 'cp_mode')}".lower()
    if re.search(r"ulysses|a2a|all-to-all", words):
        return "ulysses"
    if re.search(r"all-?gather", words):
        return "all-gather"
    return "ring"


def _list_stages_per_rank(row: Mapping[str, Any], pp: int, num_layers: int) -> list[int]:
    v = get_optional_positive_int(row, "vpp")
    if pp == 1:
        if v is not None and v > 1:
            raise UnusableRow("vpp without a pipeline")
        return [1]
    if v is not None:
        _require_cut_into_stages(num_layers, pp * v)
        return [v]
    if (
        "interleaved" in get_text(row, "pp_schedule").lower()
        or "1f1b-i" in get_text(row, "pp_schedule").lower()
    ):
        return [max(1, num_layers // pp)]
    if num_layers % pp:
        return [1]
    # Unsaid: plain, or as many as leave each a whole number of blocks.
    blocks = num_layers // pp
    most = max(v for v in range(1, MAX_TRIED_STAGES_PER_RANK + 1) if blocks % v == 0)
    return sorted({1, most})


def _require_cut_into_stages(num_layers: int, num_stages: int) -> None:
    """Raise UnusableRow if no framework cuts so many layers into equal stages."""
    possible = range(num_layers, num_layers + MAX_EXTRA_BLOCKS + 1)
    if num_stages > num_layers or all(count % num_stages for count in possible):
        raise UnusableRow("stages do not divide the layers")


def _count_last_stage_blocks(row: Mapping[str, Any], pp: int, num_layers: int) -> int:
    """Blocks of the rank with the head, with those that predict further ahead; 0 where the row
    does not say, or has no pipeline."""
    blocks = get_optional_positive_int(row, "last_stage_blocks")
    if blocks is None or pp == 1:
        return 0
    if blocks > num_layers:
        raise UnusableRow("absurd last_stage_blocks")
    return blocks


def _list_micro_batch_sizes(row: Mapping[str, Any]) -> tuple[int, ...]:
    micro_batch = get_optional_positive_int(row, "micro_batch")
    return (micro_batch,) if micro_batch else TRIED_MICRO_BATCH_SIZES


def _list_zero_stages_and_shards(row: Mapping[str, Any], dp: int) -> list[tuple[int, int]]:
    """ZeRO stages, each with the number of ranks that share one copy of the sharded states."""
    shards = []
    for stage in list_possible_zero_stages(row):
        sizes = [dp]
        if stage:
            sizes = _list_shard_sizes(row, dp)
        shards += [(stage, size) for size in sizes]
    return shards


def _list_shard_sizes(row: Mapping[str, Any], dp: int) -> list[int]:
    words = get_text(row, "dp_mode").lower()
    match = re.search(r"(?:over|fsdp|hsdp)\s+(\d+)\b", words)
    shards = int(match[1]) if match else dp
    if shards <= 0 or dp % shards:
        shards = dp
    if match or not re.search(r"\+\s*dp|hsdp|hybrid", words):
        return [shards]
    # Sharded over some ranks and replicated over the rest, of which only the product is known.
    return sorted({dp, *(part for part in (8, 16, 32, 64, 128, 256) if dp % part == 0)})


def _count_microbatches(row: Mapping[str, Any], dp: int, micro_batch: int) -> int | None:
    """Microbatches of one rank and step; None where the batch does not divide, or is another than
    the row's number of microbatches has."""
    batch = get_optional_positive_int(row, "global_batch")
    stated = next(
        filter(None, (get_optional_positive_int(row, key) for key in MICROBATCH_KEYS)), None
    )
    if batch is None:
        if stated is None:
            raise UnusableRow("no global_batch")
        return stated
    count, rest = divmod(batch, dp * micro_batch)
    if rest or (stated is not None and stated != count):
        return None
    return count
