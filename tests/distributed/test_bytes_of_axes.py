"""How often, and how many bytes, each axis sends in a step, against the formulas of
docs/strategies.md.

For tp see test_tensor_parallel.py, for cp test_context_parallel.py, for compression
tests/contracts/test_hooks.py.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from collectives import CountCollectives
from models import (
    CPU,
    SEQ_LEN,
    VOCAB,
    decoder,
    decoder_of,
    fill,
    global_batches,
    plan,
    shape,
    share,
)
from phalanx.job.schema import Job
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.models.decoder import Decoder, example_batch
from phalanx.nn.objective import causal_cross_entropy
from phalanx.nn.routing import Router, Routing
from phalanx.parallel.data_parallel import fsdp_communication
from phalanx.parallel.expert.transform import is_mixture_of_experts
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.communication import ep_sent_bytes_per_step
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.workload import Workload
from pipelines import BATCH, MICRO, pipeline_plan
from ranks import run_ranks

OBJECTIVE = causal_cross_entropy(16)


# Data parallelism


def unit_bytes() -> tuple[list[int], int]:
    """(fp32 bytes of each block, of all else) of the tests' decoder, with rows for two ranks to
    share evenly."""

    def padded(module: torch.nn.Module) -> int:
        return sum(-(-len(p) // 2) * 2 * p[0].nbytes for p in module.parameters())

    model = decoder(tied=True, dtype=torch.float32)
    blocks = [padded(block) for block in model.blocks]
    return blocks, padded(model) - sum(blocks)


def sent_by_fsdp(
    rank: int, num_ranks: int, num_microbatches: int, how: dict[str, Any]
) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()

    def counted(name: str, call: Any) -> Any:
        def run(rows: torch.Tensor, group: Any) -> Any:
            counts[name] += 1
            num_bytes[name] += (
                rows.nbytes * (len(rows) - 1) // len(rows)
            )  # to send: all but one's own row
            return call(rows, group)

        return run

    fsdp_communication.all_gather_rows_in_place = counted(
        "gather", fsdp_communication.all_gather_rows_in_place
    )  # type: ignore[attr-defined]
    fsdp_communication.reduce_scatter_rows = counted(
        "scatter", fsdp_communication.reduce_scatter_rows
    )  # type: ignore[attr-defined]
    a_plan = plan(num_ranks, num_microbatches, **how)
    with open_mesh(a_plan.layout, device="cpu", collectives="gloo") as mesh:
        model = parallelize(decoder(tied=True, dtype=torch.float32), a_plan, mesh)
        batches = share(global_batches(1)[0], rank, num_ranks, num_microbatches)
        with CountCollectives() as moved:
            sums = model.forward_backward(batches, OBJECTIVE)
        facts = model.reduce_and_clip(sums)
        return {
            "counts": dict(counts),
            "bytes": dict(num_bytes),
            "sent": facts.sent_bytes,
            "moved": moved.num_bytes,
        }


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_zero3_gathers_blocks_twice_a_microbatch_and_zero2_once(num_microbatches: int) -> None:
    """With one microbatch ZeRO-3 sends 1.5 times what ZeRO-2 and DDP do, of blocks (arXiv
    1910.02054, section 7): the root stays whole until the backward.

    Both scatter gradients once a step: those of microbatches add up where they are
    (parallel.accumulate = "unsharded").
    """
    blocks, rest = unit_bytes()
    for stage, times in ((3, 2), (2, 1)):
        how = {"dp_shard": 2, "zero_stage": stage, "accumulate": "unsharded"}
        for found in run_ranks(2, sent_by_fsdp, 2, num_microbatches, how):
            gathers = num_microbatches
            assert found["counts"] == {
                "gather": gathers * (times * len(blocks) + 1),
                "scatter": len(blocks) + 1,
            }
            assert found["bytes"]["gather"] == gathers * (times * sum(blocks) + rest) // 2
            assert found["bytes"]["scatter"] == found["sent"] == (sum(blocks) + rest) // 2
            whole = {
                "broadcast_": gathers * (times * sum(blocks) + rest),
                "reduce_": sum(blocks) + rest,
            }
            assert found["moved"] == whole  # of which a rank has half, and sends the other's


def test_hsdp_scatters_within_and_reduces_between_groups() -> None:
    blocks, rest = unit_bytes()
    total = sum(blocks) + rest
    for found in run_ranks(
        4, sent_by_fsdp, 4, 1, {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3}
    ):
        assert (
            found["sent"] == total // 2 + total // 2
        )  # a reduce-scatter of 2, then an all-reduce of the half
        gathered = 2 * sum(blocks) + rest
        assert found["moved"] == {
            "broadcast_": gathered,
            "reduce_": total,
            "allreduce_": total // 2,
        }


# Pipelines


def sent_by_stages(rank: int, schedule: str) -> tuple[int, int]:
    """What phalanx says, and what was really sent."""
    a_plan = pipeline_plan(2, pp=2, schedule=schedule)
    batches = [example_batch(shape(), MICRO, SEQ_LEN, seed=seed) for seed in range(BATCH // MICRO)]
    with open_mesh(a_plan.layout, device="cpu", collectives="gloo") as mesh:
        model = parallelize(decoder_of(8).float(), a_plan, mesh)
        first = model.reduce_and_clip(model.forward_backward(batches, OBJECTIVE))
        # In the first step stages agreed on the forms of what they send, which is not counted.
        with CountCollectives() as moved:
            sums = model.forward_backward(batches, OBJECTIVE)
        stats = model.reduce_and_clip(sums)
        assert first.sent_pp_bytes == stats.sent_pp_bytes
        return stats.sent_pp_bytes, moved.num_bytes["send"]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_a_stage_sends_hidden_states_on_and_gradients_back(schedule: str) -> None:
    """M x micro_batch x seq_len x dim elements for each border of two stages on different ranks, in
    each direction.

    Besides, once a step: the gradient of the tied embedding, between the ranks of its two stages.
    """
    pipeline = pipeline_plan(2, pp=2, schedule=schedule).pipeline
    assert pipeline is not None
    owner, message = pipeline.rank_of_stage, MICRO * SEQ_LEN * shape().dim * 4
    borders = [(a, b) for a, b in itertools.pairwise(owner) if a != b]
    assert len(borders) == {"1f1b": 1, "interleaved": 3, "zb-v": 2}[schedule]
    wanted = [
        BATCH // MICRO * message * sum((a == rank) + (b == rank) for a, b in borders)
        for rank in range(2)
    ]
    tied = VOCAB * shape().dim * 4 if owner[0] != owner[-1] else 0
    assert run_ranks(2, sent_by_stages, schedule) == [(size + tied, size + tied) for size in wanted]


def sent_over_tp(rank: int) -> list[int]:
    a_plan = pipeline_plan(4, pp=2, tp=2, schedule="1f1b")
    batches = [example_batch(shape(), MICRO, SEQ_LEN, seed=seed) for seed in range(BATCH // MICRO)]
    with open_mesh(a_plan.layout, device="cpu", collectives="gloo") as mesh:
        model = parallelize(decoder_of(8).float(), a_plan, mesh)
        steps = [
            model.reduce_and_clip(model.forward_backward(batches, OBJECTIVE)) for _ in range(2)
        ]
        return [step.sent_tp_bytes for step in steps]


def test_shape_inference_of_a_first_step_is_not_counted() -> None:
    for first, second in run_ranks(4, sent_over_tp):
        assert first == second > 0


# Experts

EXPERTS = replace(shape(num_kv_heads=4), num_experts=8, experts_per_token=2, expert_ffn_dim=24)
ROWS, TOKENS = 4, 16


def evenly(self: Router, x_BTD: torch.Tensor) -> Routing:
    """Token t chooses the experts 2 t and 2 t + 1, counted round: every expert gets as many as
    any other."""
    batch, length = x_BTD.shape[:2]
    first = 2 * torch.arange(batch * length).view(batch, length, 1) % self.num_experts
    weights = (x_BTD @ self.weight.T).softmax(-1)[..., :2]
    return Routing(torch.cat((first, first + 1), -1), weights, None)


def plan_with_experts(recompute: str, **parallel: Any) -> Plan:
    job = Job.model_validate(
        {
            "model": {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4}
            | {"num_experts": 8, "experts_per_token": 2, "expert_ffn_dim": 24},
            "data": {"seq_len": TOKENS},
            "train": {
                "global_batch_size": 4 * ROWS,
                "micro_batch_size": ROWS // 2,
                "recompute": recompute,
            },
            "parallel": {"ranks": 4, **parallel},
        }
    )
    return make_plan(job, cluster=CPU, vocab_size=VOCAB)


def sent_to_experts(rank: int, ep: int, recompute: str) -> tuple[int, int]:
    Router.forward = evenly  # type: ignore[method-assign]
    a_plan = plan_with_experts(recompute, dp_shard=4, ep=ep)
    with open_mesh(a_plan.layout, device="cpu", collectives="gloo") as mesh:
        module = Decoder(EXPERTS)
        fill(module)
        model = parallelize(module, a_plan, mesh)
        sums = model.forward_backward(
            [example_batch(EXPERTS, ROWS // 2, TOKENS, seed=s) for s in range(2)], OBJECTIVE
        )
        dispatches = (part.dispatch for part in module.modules() if is_mixture_of_experts(part))
        (group,) = {id(dispatch.group): dispatch.group for dispatch in dispatches}.values()
        return group.num_exchanges, model.reduce_and_clip(sums).sent_ep_bytes


@pytest.mark.parametrize(
    ("ep", "recompute"), [pytest.param(2, "none", marks=pytest.mark.long), (4, "none"), (4, "full")]
)
def test_tokens_travel_to_their_experts_and_back_twice(ep: int, recompute: str) -> None:
    """Of a microbatch of N tokens a layer sends K N (ep - 1) / ep rows of dim there and back in the
    forward, and their gradients in the backward; recomputing the block sends those of the forward
    again.

    And E counts, each 8 bytes.
    """
    passes, layers, tokens = (
        6 if recompute == "full" else 4,
        EXPERTS.num_expert_layers,
        ROWS * TOKENS,
    )
    rows = EXPERTS.experts_per_token * tokens * (ep - 1) // ep
    counts = passes // 2 - 1  # where a forward is computed
    if recompute == "none":  # what a plan says, which does not know the counts
        work = Workload(ROWS // 2, TOKENS, "fp32", "none", 16, num_microbatches=2, ep=ep)
        assert ep_sent_bytes_per_step(EXPERTS, work) == layers * passes * rows * EXPERTS.dim * 4
    wanted = layers * (
        passes * rows * EXPERTS.dim * 4 + 2 * counts * EXPERTS.num_experts * 8 * (ep - 1) // ep
    )
    for num_exchanges, num_bytes in run_ranks(4, sent_to_experts, ep, recompute):
        assert (num_exchanges, num_bytes) == (2 * layers * passes, wanted)


WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "fsdp": {"dp_shard": 4, "ep": 2, "keep_whole_below": 100},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "accumulate": "sharded"},
    "ddp": {"dp_replicate": 2, "cp": 2, "ep": 2},
    "ddp, experts of one rank": {"cp": 4, "ep": 4},
}


def gradients_sent(rank: int) -> dict[str, tuple[int, int]]:
    """By layout: (bytes that the step tells, bytes of plain gradients)."""
    found = {}
    for name, axes in WITH_EXPERTS.items():
        a_plan = plan_with_experts("none", **axes)
        with open_mesh(a_plan.layout, device="cpu", collectives="gloo") as mesh:
            module = Decoder(EXPERTS)
            fill(module)
            model = parallelize(module, a_plan, mesh)
            sums = model.forward_backward(
                [example_batch(EXPERTS, ROWS // 2, TOKENS, seed=s) for s in range(2)], OBJECTIVE
            )
            found[name] = (model.reduce_and_clip(sums).sent_bytes, model.plain_bytes)
    return found


def test_gradients_of_experts_travel_between_ranks_that_hold_the_same() -> None:
    """n bytes of experts, of which a rank holds n / ep, are reduced over D / ep ranks, all else
    over D.

    With accumulate = "sharded" they are scattered in each of the two microbatches, and reduced
    between copies of a shard once. Parameters that stay whole are all-reduced.
    """
    experts = dense = small = 0
    for name, parameter in Decoder(EXPERTS).named_parameters():
        if ".experts." in name:
            experts += parameter.nbytes // 2
        else:
            dense += parameter.nbytes
            small += parameter.nbytes if parameter.numel() < 100 else 0
    row = EXPERTS.dim * 4  # of the embedding, the only one whose rows ranks do not share evenly
    padded = {num_ranks: dense + -VOCAB % num_ranks * row for num_ranks in (2, 4)}
    replicated = dense * 3 // 2
    wanted = {
        "fsdp": ((padded[4] - small) * 3 // 4 + small * 3 // 2 + experts // 2, 0),
        # the experts of ep over dp_shard have no other shard, and are all-reduced alone
        "hsdp": (2 * padded[2] // 2 + padded[2] // 2 + experts, 0),
        "ddp": (replicated + experts, replicated + experts),
        "ddp, experts of one rank": (replicated, replicated),
    }
    for found in run_ranks(4, gradients_sent):
        assert found == wanted
