"""Model-state bytes, against every row of the ZeRO paper's table.

Activations and the rest have tests of their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.job.schema import Job, Parallel
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.plan.cluster import Cluster
from phalanx.plan.host_allocator import (
    LIBRARY_BYTES,
    RETAINED_ACTIVATION_SHARE,
    RETAINED_SHARE_OF_BUCKETS,
    RETAINED_SHARE_OF_OTHER_MOMENTS,
    RETAINED_SHARE_WHEN_ACCUMULATING,
)
from phalanx.plan.memory import (
    MIXED_FP16_ADAM_STATE_BYTES,
    StateBytes,
    activation_bytes,
    predict_model_state_bytes,
)
from phalanx.plan.memory_phases import (
    MOVING_CATEGORIES,
    predict_rank_memory,
    predict_rank_memory_by_phase,
)
from phalanx.plan.planner import make_plan
from phalanx.plan.workload import Workload, shard_shape

ROWS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "zero_memory.json").read_text()
)


def test_the_table_is_all_there() -> None:
    cases = {(row["params_b"], row["dp"], row["zero_stage"]) for row in ROWS}
    assert cases == {
        (p, n, s) for p in (7.5, 128, 1000) for n in (1, 4, 16, 64, 256, 1024) for s in (1, 2, 3)
    }


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row['params_b']}B-dp{row['dp']}-stage{row['zero_stage']}"
)
def test_states_are_those_of_the_zero_paper(row: dict[str, Any]) -> None:
    """arXiv 1910.02054, Table 1: its formula to four decimals, and the printed number to the
    rounding of its print."""
    found = (
        sum(
            predict_model_state_bytes(
                row["params_b"] * 1e9, row["zero_stage"], row["dp"], MIXED_FP16_ADAM_STATE_BYTES
            ).values()
        )
        / 1e9
    )
    assert found == pytest.approx(row["formula_gb"], abs=5.1e-5)
    assert found == pytest.approx(
        row["model_state_gb"], rel=0.004, abs=0.06
    )  # printed with 2 to 4 digits, or cut


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_stage_splits_one_more_kind(stage: int) -> None:
    """Optimizer from stage 1, gradients from 2, parameters from 3 (section 5 of the paper), in
    phalanx's own bytes."""
    found = predict_model_state_bytes(1000, stage, 8, StateBytes())
    assert found == {
        "optimizer": 8000 / (8 if stage >= 1 else 1),
        "gradients": 4000 / (8 if stage >= 2 else 1),
        "parameters": 4000 / (8 if stage >= 3 else 1),
    }


# What a job says beyond the degrees, against sums by hand

SHAPE = DecoderShape(6, 64, 4, 4, 16, 160, 97, True)
BLOCK = SHAPE.block_params
REST = SHAPE.num_params - 6 * BLOCK


def memory(
    stage: int, device: str = "cpu", num_microbatches: int = 2, **options: Any
) -> dict[str, int]:
    work = Workload(1, 8, "fp32", "none", 2048, num_microbatches, options=Parallel(**options))
    return predict_rank_memory(SHAPE, work, stage, 2, device, 2)


def phases(
    stage: int, num_microbatches: int = 2, num_ranks: int = 2, **options: Any
) -> dict[str, dict[str, int]]:
    work = Workload(1, 8, "fp32", "none", 2048, num_microbatches, options=Parallel(**options))
    return predict_rank_memory_by_phase(SHAPE, work, stage, num_ranks, "cpu", num_ranks)


@pytest.mark.parametrize(
    ("options", "gathered", "gradients"),
    [
        ({}, REST + BLOCK, SHAPE.num_params),
        ({"accumulate": "sharded"}, REST + BLOCK, 0),
        ({"blocks_per_unit": 4}, REST + 4 * BLOCK, SHAPE.num_params),
        ({"blocks_per_unit": 9}, SHAPE.num_params, SHAPE.num_params),
        ({"blocks_per_unit": "all"}, SHAPE.num_params, SHAPE.num_params),
    ],
)
def test_what_zero3_gathers(options: dict[str, Any], gathered: int, gradients: int) -> None:
    """Where the loss is made: the root's unit, the last unit of blocks, and whole gradients of
    earlier microbatches."""
    assert phases(3, **options)["forward"]["communication"] == 4 * (gathered + gradients)


@pytest.mark.parametrize(
    ("device", "prefetch", "num_units"),
    [("cpu", None, 1), ("cuda", None, 2), ("cpu", 1, 2), ("cpu", 2, 3)],
)
def test_what_zero3_gathers_in_the_backward(
    device: str, prefetch: int | None, num_units: int
) -> None:
    """Units fetched ahead, by themselves on GPUs alone; a weight's gradient in its unit, and all
    gradients of a microbatch before."""
    options = {} if prefetch is None else {"prefetch": prefetch}
    first = SHAPE.ffn_dim * SHAPE.dim
    expected = REST + num_units * BLOCK + SHAPE.num_params + first
    work = Workload(1, 8, "fp32", "none", 2048, 2, options=Parallel(**options))
    by_phase = predict_rank_memory_by_phase(SHAPE, work, 3, 2, device, 2)
    assert by_phase["backward"]["communication"] == 4 * expected


@pytest.mark.parametrize(("chunk", "zero_stage"), [(8, 3), (8, 2), (4, 3)])
def test_what_the_loss_has_read_last_is_not_there_in_the_backward(
    chunk: int, zero_stage: int
) -> None:
    """The embedding, tied to the head. Of one chunk of logits the head's gradient is where it was."""
    table, params = 97 * 64, SHAPE.num_params

    def find(*, frees_head: bool) -> dict[str, dict[str, int]]:
        work = Workload(1, 8, "fp32", "none", chunk, frees_head=frees_head)
        return predict_rank_memory_by_phase(SHAPE, work, zero_stage, 2, "cuda", 2)

    freed, kept = find(frees_head=True), find(frees_head=False)
    gathered = REST + BLOCK if zero_stage == 3 else params
    saved_in_loss = 4 * table if chunk == 8 else 0
    assert kept["forward"]["communication"] == 4 * gathered
    for phase, saved in (("forward", saved_in_loss), ("backward", 4 * table)):
        before, after = (sum(memory[phase].values()) for memory in (kept, freed))
        assert before - after == saved, phase


def test_zero2_counts_its_shards_and_what_it_gathers_once_each() -> None:
    found = phases(2, num_microbatches=1)["forward"]
    assert found["parameters"] == SHAPE.num_params * 4 / 2
    assert found["communication"] == 4 * SHAPE.num_params


def test_the_loss_and_the_backward_of_blocks_do_not_meet() -> None:
    """The plan is the highest phase, and less than everything together."""
    for stage in range(4):
        by_phase = phases(stage, num_microbatches=1)
        totals = {phase: sum(memory.values()) for phase, memory in by_phase.items()}
        assert sum(memory_of(stage).values()) == max(totals.values())
        assert totals["between steps"] <= totals["update"] <= max(totals.values())


def memory_of(stage: int) -> dict[str, int]:
    return memory(stage, num_microbatches=1)


def test_gradients_wait_for_the_backward_unless_they_are_buckets() -> None:
    """DDP's buckets are there all the time; a rank alone, and shards, have none in the forward."""
    whole = 4 * SHAPE.num_params
    assert phases(0, num_microbatches=1)["forward"]["gradients"] == whole
    assert phases(0, num_microbatches=1, num_ranks=1)["forward"]["gradients"] == 0
    assert phases(0, num_microbatches=2, num_ranks=1)["forward"]["gradients"] == whole
    assert phases(3, num_microbatches=1)["forward"]["gradients"] == 0
    assert phases(3, num_microbatches=1)["update"]["gradients"] == whole / 2


@pytest.mark.parametrize(
    ("offload", "away"),
    [("optimizer", {"optimizer"}), ("parameters", {"optimizer", "parameters", "gradients"})],
)
def test_what_waits_on_the_host_takes_nothing_of_a_gpu(offload: str, away: set[str]) -> None:
    states = ("parameters", "gradients", "optimizer")
    work = Workload(1, 8, "fp32", "none", 2048, 1, options=Parallel(offload=offload))
    update = predict_rank_memory_by_phase(SHAPE, work, 3, 2, "cuda", 2)["update"]
    assert {kind for kind in states if update[kind] == 0} == away
    assert memory(3, "cpu", offload=offload) == memory(3, "cpu")


def test_ddp_accumulates_in_its_buckets() -> None:
    totals = [sum(memory(stage, num_microbatches=n).values()) for stage in (0, 1) for n in (1, 2)]
    allocator = [memory(stage, num_microbatches=n)["allocator"] for stage in (0, 1) for n in (1, 2)]
    tensors = [total - kept for total, kept in zip(totals, allocator, strict=True)]
    assert tensors[0] == tensors[1]
    assert tensors[2] == tensors[3]


def retained_bytes_of_other_moments(
    shape: DecoderShape, work: Workload, num_ranks: int, dp: int
) -> float:
    """What is kept of other moments than the highest: by category, of all phases."""
    phases = predict_rank_memory_by_phase(shape, work, 0, dp, "cpu", num_ranks).values()
    moving = [[phase[name] for name in MOVING_CATEGORIES] for phase in phases]
    in_buckets = 0.0
    if num_ranks > 1 and work.num_microbatches > 1:
        in_buckets = RETAINED_SHARE_OF_BUCKETS * 4 * shape.num_params
    other = sum(map(max, zip(*moving, strict=True))) - max(map(sum, moving))
    return in_buckets + RETAINED_SHARE_OF_OTHER_MOMENTS * other


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "precision", "of_block"),
    [(2, 1, "fp32", 0), (1, 2, "fp32", 4), (2, 2, "bf16", 6)],
)
def test_a_cpu_keeps_freed_gradients_that_accumulate(
    num_ranks: int, num_microbatches: int, precision: str, of_block: int
) -> None:
    work = Workload(1, 8, precision, "none", 2048, num_microbatches)
    found = predict_rank_memory(SHAPE, work, 0, num_ranks, "cpu", num_ranks)
    share = RETAINED_SHARE_WHEN_ACCUMULATING if num_microbatches > 1 else RETAINED_ACTIVATION_SHARE
    rest = LIBRARY_BYTES + round(share * activation_bytes(SHAPE, work))
    rest += retained_bytes_of_other_moments(SHAPE, work, num_ranks, num_ranks)
    table = 4 * SHAPE.vocab_size * SHAPE.dim if num_microbatches > 1 else 0
    assert found["allocator"] - rest == pytest.approx(of_block * BLOCK + table, abs=1)


def test_what_glibc_gives_back_is_not_kept() -> None:
    large = DecoderShape(1, 4096, 4, 4, 1024, 16384, 97, True)
    work = Workload(1, 8, "fp32", "none", 2048, 2)
    found = predict_rank_memory(large, work, 0, 2, "cpu", 2)
    rest = LIBRARY_BYTES + round(RETAINED_SHARE_WHEN_ACCUMULATING * activation_bytes(large, work))
    rest += retained_bytes_of_other_moments(large, work, 2, 2)
    assert found["allocator"] - rest == pytest.approx(4 * large.vocab_size * large.dim, abs=1)


@pytest.mark.parametrize(("tp", "share"), [(2, 0.4), (4, 0.8), (8, 0.8)])
def test_tensor_parallel_ranks_have_no_buckets_and_more_holes_the_finer_they_cut(
    tp: int, share: float
) -> None:
    wide = DecoderShape(2, 512, 8, 8, 64, 1376, 97, True)
    work = Workload(2, 512, "fp32", "none", 2048, 1, tp=tp)
    found = predict_rank_memory(wide, work, 0, 1, "cpu", tp)
    assert found["communication"] == 0
    holes = share * activation_bytes(shard_shape(wide, tp), work)
    holes += retained_bytes_of_other_moments(wide, work, tp, 1)
    assert found["allocator"] == pytest.approx(LIBRARY_BYTES + holes, abs=1)


def test_frozen_parameters_have_no_gradients_and_no_moments() -> None:
    half = predict_model_state_bytes(1000, 0, 8, StateBytes(), trained=0.5)
    assert half == {"parameters": 4000, "gradients": 2000, "optimizer": 4000}


def test_a_plan_for_gpus_says_what_waits_in_host_memory() -> None:
    job = Job.model_validate(
        {
            "parallel": {"dp_shard": 2, "offload": "optimizer"},
            "train": {"offload_activations": True},
        }
    )
    plan = make_plan(job, cluster=Cluster("cuda", 2, 80 * 2**30, "H100"), vocab_size=257)
    assert plan.chosen.predicted_bytes["optimizer"] == 0
    assert any(reason.startswith("host memory: ") for reason in plan.reasons)
