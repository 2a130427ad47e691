"""The ZeRO stage of published rows, by how people write it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.plan.validation.row_values import UnusableRow
from phalanx.plan.validation.row_zero_stage import list_possible_zero_stages, parse_zero_stages

PUBLISHED = Path(__file__).parents[2] / "benchmarks/published"
SPELLINGS = {
    0: (
        *("DDP", "ddp", "DP", "none", "None", "DDP(local)", "DDP(torch)", "torch DDP"),
        *("distributed data parallel", "DistributedDataParallel", "Distributed Data-Parallel"),
        *("data parallel", "data-parallel", "data parallelism", "all-reduce", "allreduce"),
        *("replicated", "NO_SHARD", "FSDP NO_SHARD", "ZeRO-0", "ZeRO stage 0", "no ZeRO"),
        *("without ZeRO", "DDP, no distributed optimizer", "DDP without distributed optimizer", "DDP w/o ZeRO"),
        *("DDP (not sharded)", "use_distributed_optimizer=false", "non-FSDP", "ZeRO: off"),
        *("DDP, no gradient bucketing overlap (use_gradient_bucket=false)", "no FSDP (DDP)"),
    ),
    1: (
        *("ZeRO-1", "zero1", "ZeRO 1", "Zero Stage 1", "ZeRO stage-1", "zero_stage=1", "stage 1"),
        *("DeepSpeed ZeRO-1", "ZeRO-1 sharded over 8 ranks (hierarchical)", "ZeRO_1"),
        *("distributed optimizer", "DDP + distributed optimizer", "dist-opt", "dist optim"),
        *("Distributed Optimizer, overlap grad-reduce+param-gather", "use_distributed_optimizer"),
        *("distributed data parallel + distributed optimizer", "distopt", "DistributedOptimizer"),
        *("optimizer state sharding", "sharded optimizer", "sharding of the optimizer", "P_os"),
        *("Megatron-LM dist. optimizer", "sharded optimizer states", "OSS"),
    ),
    2: (
        *("ZeRO-2", "zero2", "ZeRO stage 2", "DeepSpeed stage 2"),
        *("SHARD_GRAD_OP", "FSDP1 SHARD_GRAD_OP / composer mixed precision DEFAULT", "z2"),
        *("FSDP (ZeRO-2)", "FSDP2, reshard_after_forward=False", "_HYBRID_SHARD_ZERO2"),
        *("optim_grads", "fairscale ShardedDDP", "sharded data parallel", "P_os+g"),
        "ZeRO-Offload",
    ),
    3: (
        *("ZeRO-3", "zero3", "Zero3", "ZeRO stage 3", "ZeRO Stage-3", "ZeRO: stage 3", "stage3"),
        *("DeepSpeed ZeRO stage: 3", "zero_stage 3", "ZeRO-DP stage 3", "ZeRO++", "z3"),
        *("FSDP", "FSDP1", "FSDP2", "FSDP(+DP)", "FSDP 256", "FSDP 128 x DP 16", "HSDP", "PyTorch FSDP"),
        *("FSDP1 FULL_SHARD / composer mixed precision PURE", "fully sharded data parallel"),
        *("FullyShardedDataParallel", "full sharding", "Megatron-FSDP", "hybrid sharded"),
        *("FSDP2+CP (params sharded over dp x cp)", "optim_grads_params", "P_os+g+p"),
        *("HYBRID_SHARD", "ZeRO-Infinity"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "stage"), [(words, stage) for stage, all in SPELLINGS.items() for words in all]
)
def test_words_of_a_row_mean_this_stage(words: str, stage: int) -> None:
    assert list_possible_zero_stages({"dp_mode": words}) == (stage,)


@pytest.mark.parametrize(
    ("words", "stages"),
    [
        ("ZeRO", (1, 2, 3)),
        ("DeepSpeed ZeRO, bf16", (1, 2, 3)),
        ("ZeRO-1 or ZeRO-3", (1, 3)),
        ("", (0, 1, 3)),
        ("as needed", (0, 1, 3)),
        ("not stated", (0, 1, 3)),
    ],
)
def test_what_a_row_leaves_open_stays_open(words: str, stages: tuple[int, ...]) -> None:
    assert list_possible_zero_stages({"dp_mode": words}) == stages


@pytest.mark.parametrize(
    "words", ["gossip", "ZeRO-4", "stage 7", "distributed", "full", "local SGD"]
)
def test_words_that_say_no_stage_are_not_guessed(words: str) -> None:
    with pytest.raises(UnusableRow, match="unknown dp_mode"):
        list_possible_zero_stages({"dp_mode": words})


def test_the_key_goes_before_the_words() -> None:
    assert list_possible_zero_stages({"zero_stage": 2, "dp_mode": "DDP"}) == (2,)


def test_words_of_the_published_rows_mean_the_stage_beside_them() -> None:
    stated = set()
    for path in sorted(PUBLISHED.glob("runs*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row.get("dp_mode") is not None and row.get("zero_stage") is not None:
                stated.add((row["dp_mode"], row["zero_stage"]))
    assert len(stated) > 25
    # One source says of a layout with one data-parallel rank that nothing is sharded.
    stated.discard(("DeepSpeed ZeRO-1", 0))
    assert {words: parse_zero_stages(words) for words, _ in stated} == {
        words: (stage,) for words, stage in stated
    }
