"""Memory of pipeline ranks: what adds up to the whole model, what is in flight, and what waits
for a W."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from models import fill, shape
from phalanx.core.errors import LayoutError
from phalanx.job.schema import Job
from phalanx.nn.models.decoder import Decoder
from phalanx.plan.cluster import Cluster
from phalanx.plan.memory import activation_bytes, bytes_at_forward_end
from phalanx.plan.memory_phases import predict_rank_memory_by_phase
from phalanx.plan.pipeline.cut import StageCut
from phalanx.plan.pipeline.generate import SCHEDULE_NAMES
from phalanx.plan.pipeline.memory import (
    predict_pipeline_memory,
    predict_pipeline_memory_by_phase,
    predict_rank_activation_bytes,
    predict_stage_bytes,
)
from phalanx.plan.pipeline.pipeline_plan import Pipeline, build_named_pipeline
from phalanx.plan.planner import make_plan
from phalanx.plan.segments import list_recompute_segments
from phalanx.plan.workload import Workload

FOUR = StageCut((2, 2, 2, 2))
EIGHT_BLOCKS = shape(num_layers=8)
WORK = Workload(2, 16, "fp32", "none", 8, 4, segments=())
OPTIMIZER = 8
SHARED_EXPERTS = {
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_ffn_dim": 24,
    "num_shared_experts": 2,
}


def memory(
    pipeline: Pipeline, zero_stage: int = 0, dp_size: int = 1, work: Workload = WORK
) -> list[dict[str, int]]:
    return list(
        predict_pipeline_memory(EIGHT_BLOCKS, work, pipeline, zero_stage, dp_size, "cuda", dp_size)
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_ranks_hold_the_whole_model_together(name: str, tied: bool) -> None:
    """A tied embedding is on the first and the last stage: twice, unless one rank has both."""
    model = shape(num_layers=8, tied=tied)
    stages = FOUR if name == "1f1b" else StageCut((1,) * 8)
    pipeline = build_named_pipeline(name, 4, 8, stages)
    found = predict_pipeline_memory(model, WORK, pipeline, 0, 1, "cuda", 1)
    again = model.vocab_size * model.dim if tied and name == "1f1b" else 0
    assert sum(rank["parameters"] for rank in found) == 4 * (model.num_params + again)
    assert [rank["optimizer"] for rank in found] == [2 * rank["parameters"] for rank in found]
    assert [rank["gradients"] for rank in found] == [rank["parameters"] for rank in found]


def test_embedding_head_and_blocks_by_rank() -> None:
    """dim 32, 4 heads and 2 of keys and values of 8, gated 40: a block of 6,976; 37 rows of 32
    before and after."""
    model = shape(num_layers=8, tied=False)
    block = 32 * 8 * (4 + 4 + 2 + 2) + 3 * 32 * 40 + 2 * 32
    assert block == 6976 == model.block_params
    parts = model.count_part_params()
    assert (parts.before, parts.after, parts.blocks) == (37 * 32, 37 * 32 + 32, (block,) * 8)
    found = predict_pipeline_memory(
        model, WORK, build_named_pipeline("1f1b", 4, 4, StageCut((1, 3, 3, 1))), 0, 1, "cuda", 1
    )
    assert [rank["parameters"] // 4 for rank in found] == [
        block + 1184,
        3 * block,
        3 * block,
        block + 1216,
    ]


def test_sharding_splits_states_and_gathers_stages_whole() -> None:
    pipeline = build_named_pipeline("1f1b", 4, 4, FOUR)
    whole = memory(pipeline)
    for stage in (1, 2, 3):
        split = memory(pipeline, stage, 2)
        for one, other in zip(split, whole, strict=True):
            assert one["optimizer"] == other["optimizer"] // 2
            if stage == 1:
                assert (one["parameters"], one["gradients"]) == (
                    other["parameters"],
                    other["gradients"],
                )
            else:
                assert one["parameters"] == other["parameters"] // 2
                assert one["gradients"] == 0  # shards come when the whole ones go
                # whole parameters and whole gradients, from the first microbatch to the last
                assert one["communication"] - other["communication"] == 2 * other["parameters"]


def test_stages_keep_what_the_model_keeps() -> None:
    """Of one microbatch: all stages together what one rank keeps, and besides what a stage hands
    on, tables of angles in each stage, and the gradients that the loss has computed."""
    pipeline = build_named_pipeline("gpipe", 4, 1, FOUR)
    kept = sum(predict_stage_bytes(EIGHT_BLOCKS, WORK, pipeline, stage).saved for stage in range(4))
    tables = 3 * EIGHT_BLOCKS.activations.count_bytes_in_every_stage(WORK)
    loss = WORK.tokens * 32 * 4 + 37 * 32 * 4
    assert (
        kept
        == bytes_at_forward_end(EIGHT_BLOCKS, WORK)
        + 3 * EIGHT_BLOCKS.activations.count_message_bytes(WORK)
        + tables
        + loss
    )
    assert EIGHT_BLOCKS.activations.count_message_bytes(WORK) == 2 * 16 * 32 * 4


def test_one_stage_less_is_one_microbatch_less_of_1f1b() -> None:
    """Stages of equal blocks hold 4, 3, 2 and 1 microbatches; those of GPipe all 8."""
    pipeline = build_named_pipeline("1f1b", 4, 8, FOUR)
    one = [predict_stage_bytes(EIGHT_BLOCKS, WORK, pipeline, stage).saved for stage in range(4)]
    assert list(predict_rank_activation_bytes(EIGHT_BLOCKS, WORK, pipeline)) == [
        4 * one[0],
        3 * one[1],
        2 * one[2],
        one[3],
    ]
    every = predict_rank_activation_bytes(
        EIGHT_BLOCKS, WORK, build_named_pipeline("gpipe", 4, 8, FOUR)
    )
    assert list(every) == [8 * size for size in one]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_recompute_holds_inputs_of_all_microbatches_and_one_block(name: str) -> None:
    stages = FOUR if name in ("gpipe", "1f1b") else StageCut((1,) * 8)
    pipeline = build_named_pipeline(name, 4, 8, stages)
    full = replace(WORK, segments=list_recompute_segments("full", 8))
    for stage in range(pipeline.num_stages):
        plain, again = (
            predict_stage_bytes(EIGHT_BLOCKS, work, pipeline, stage) for work in (WORK, full)
        )
        block = EIGHT_BLOCKS.activations.block(0, WORK).saved
        num_blocks = stages.num_blocks[stage]
        assert plain.redone == 0
        assert plain.saved - again.saved == num_blocks * (block - WORK.tokens * 32 * 4)
        # The last block is redone beside the inputs of all: together as activation_bytes has it of
        # a model so deep.
        alone = replace(EIGHT_BLOCKS, num_layers=num_blocks)
        of_model = replace(full, segments=list_recompute_segments("full", num_blocks))
        assert again.redone == activation_bytes(alone, of_model) - bytes_at_forward_end(
            alone, of_model
        )
    assert max(predict_rank_activation_bytes(EIGHT_BLOCKS, full, pipeline)) < max(
        predict_rank_activation_bytes(EIGHT_BLOCKS, WORK, pipeline)
    )


def test_only_the_last_stage_has_a_loss_and_ends_get_no_messages_alone() -> None:
    found = memory(build_named_pipeline("1f1b", 4, 4, FOUR))
    assert [rank["loss"] > 0 for rank in found] == [False, False, False, True]
    assert {rank["communication"] for rank in found} == {
        2 * EIGHT_BLOCKS.activations.count_message_bytes(WORK)
    }
    v = memory(build_named_pipeline("zb-v", 4, 8, StageCut((1,) * 8)))
    assert [rank["loss"] > 0 for rank in v] == [True, False, False, False]


LATENT = {"kv_rank": 10, "head_dim": 12, "rope_head_dim": 4, "value_head_dim": 6}


@pytest.mark.parametrize(
    "changes",
    [{}, LATENT, LATENT | {"query_rank": 14}, SHARED_EXPERTS],
    ids=["plain", "latent", "latent queries", "experts"],
)
def test_weight_gradients_that_wait_keep_what_is_predicted(changes: dict[str, Any]) -> None:
    """Against the storages that split backwards hold between I and W.

    The head is the objective's, not a module.
    """
    from phalanx.parallel.pipeline.weight_grads import (
        DeferredWeightGrads,
        defer_weight_gradients_of_linears,
    )

    model = replace(shape(tied=False, num_kv_heads=4 if "kv_rank" in changes else 2), **changes)
    module = Decoder(model)
    fill(module)
    defer_weight_gradients_of_linears(module)
    tokens = torch.arange(24).reshape(2, 12) % model.vocab_size
    deferred = DeferredWeightGrads()
    with deferred.deferring_to("key"):
        module(tokens).hidden_BTD.square().sum().backward()
    gc.collect()
    # What lives until W and not longer. By address while all of it lives: afterwards addresses are
    # used again.
    alive = [
        (weakref.ref(found), found.untyped_storage())
        for found in gc.get_objects()
        if issubclass(type(found), torch.Tensor)
    ]
    between = [(tensor, storage.data_ptr(), storage.nbytes()) for tensor, storage in alive]
    del alive
    deferred.compute_deferred_gradients("key")
    gc.collect()
    held = {address: size for tensor, address, size in between if tensor() is None}
    microbatch = Workload(24, 1, "fp32", "none", 1024)
    blocks = [model.activations.block(layer, microbatch) for layer in range(model.num_layers)]
    wanted = sum(block.weight_inputs for block in blocks)
    counts = 8 * model.num_expert_layers * model.num_experts  # of rows for each expert
    assert sum(held.values()) == wanted + counts


def test_the_plan_takes_the_rank_that_needs_most_and_says_which() -> None:
    job = Job.model_validate(
        {
            "model": {"num_layers": 8},
            "train": {"global_batch_size": 16, "micro_batch_size": 2},
            "parallel": {"ranks": 8, "pp": 4, "dp_replicate": 2},
        }
    )
    plan = make_plan(job, cluster=Cluster("cpu", 8, 64 * 2**30))
    assert plan.pipeline is not None
    totals = plan.pipeline.predicted_rank_bytes
    assert plan.chosen.total_bytes == max(totals) == totals[0]
    assert plan.pipeline.rank_memory[0] == plan.chosen.predicted_bytes
    assert any(
        "rank 0 (stage 0) needs most memory, with 4 in flight" in reason for reason in plan.reasons
    )
    body = plan.to_json()["pipeline"]
    assert body["rank_bytes"] == list(totals)
    assert plan.from_json(plan.to_json()) == plan


def test_memory_that_is_too_little_for_one_rank_is_refused_with_its_own_remedy() -> None:
    sections: dict[str, Any] = {
        "model": {
            "num_layers": 32,
            "dim": 4096,
            "num_heads": 32,
            "ffn_dim": 11008,
            "vocab_size": 32000,
        },
        "train": {"global_batch_size": 64, "micro_batch_size": 4},
        "data": {"seq_len": 4096},
        "parallel": {"ranks": 4, "pp": 4},
        "precision": {"compute": "bf16"},
    }
    cluster = Cluster("cuda", 4, 80 * 2**30)
    with pytest.raises(LayoutError) as caught:
        make_plan(Job.model_validate(sections), cluster=cluster)
    assert "pp needs" in str(caught.value)
    assert "train.recompute=selective (activations" in str(caught.value) or "recompute=full" in str(
        caught.value
    )
    sections["train"]["recompute"] = "full"
    assert make_plan(Job.model_validate(sections), cluster=cluster).chosen.fits


def test_one_stage_is_as_one_rank() -> None:
    """States of a rank with all stages are those of no pipeline, and what activations take more is
    what stages hand on."""
    pipeline = build_named_pipeline("1f1b", 1, 1, StageCut((8,)))
    work = replace(WORK, num_microbatches=1)
    (one,) = predict_pipeline_memory_by_phase(EIGHT_BLOCKS, work, pipeline, 0, 1, "cuda", 1)
    plain = predict_rank_memory_by_phase(EIGHT_BLOCKS, work, 0, 1, "cuda", 1)
    assert one["update"] == plain["update"]
    (peak,) = predict_pipeline_memory(EIGHT_BLOCKS, work, pipeline, 0, 1, "cuda", 1)
    waiting = work.tokens * 32 * 4 + 37 * 32 * 4
    assert peak["activations"] == plain["forward"]["activations"] + waiting
