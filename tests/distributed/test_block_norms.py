"""Norms of gradients, updates and weights by block are those of one process in every layout.

Reference: tests/support/bare_loop.py, whose tensors are added up by their names here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bare_loop import Tensors, train_in_one_process
from models import BATCH, EXPERTS, decoder, global_batches, plan, share
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.block_norms import BlockNormRequest
from phalanx.parallel.parallelize import parallelize
from ranks import run_ranks

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ddp": {"dp_replicate": 2},
        "zero1": {"dp_shard": 2, "zero_stage": 1},
        "zero2": {"dp_shard": 2, "zero_stage": 2},
        "zero3": {"dp_shard": 2, "zero_stage": 3},
        "optimizer on the host": {"dp_shard": 2, "zero_stage": 1, "offload": "optimizer"},
        "tp": {"tp": 2},
        "cp": {"cp": 2},
        "ep": {"dp_shard": 2, "ep": 2, "num_experts": 4},
    },
    4: {
        "hsdp": {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3},
        "zero1-tp": {"dp_shard": 2, "tp": 2, "zero_stage": 1},
        "hsdp-ep": {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "num_experts": 4},
        "pp-interleaved-tp": {
            "pp": 2,
            "tp": 2,
            "schedule": "interleaved",
            "stage_blocks": (0, 1, 1, 0),
        },
    },
}
MAX_NORM = 0.05  # less than the norms: what is clipped must not show
OBJECTIVE = causal_cross_entropy(5)


def adamw(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3)


def add_up_by_block(tensors: Tensors) -> dict[str, float]:
    """Norms of the blocks of a decoder."""
    squares: dict[str, float] = {}
    for name, tensor in tensors.items():
        first, second, *_ = name.split(".")
        block = f"{first}.{second}" if first == "blocks" else first
        squares[block] = squares.get(block, 0.0) + tensor.double().square().sum().item()
    return {name: square**0.5 for name, square in squares.items()}


def compute_references(rank: int, num_experts: int) -> dict[str, dict[str, float]]:
    module = decoder(tied=False, dtype=torch.float64, num_experts=num_experts)
    trace = train_in_one_process(module, global_batches(1), adamw, MAX_NORM)
    assert trace.norms[0] > 2 * MAX_NORM
    unclipped = trace.norms[0] / MAX_NORM
    updates = {name: trace.after[name] - weight for name, weight in trace.before.items()}
    gradients = {name: unclipped * each for name, each in trace.gradients[0].items()}
    return {
        "gradients": add_up_by_block(gradients),
        "updates": add_up_by_block(updates),
        "weights": add_up_by_block(trace.before),
    }


def measure_norms(
    rank: int, num_ranks: int, layouts: dict[str, dict[str, Any]]
) -> dict[str, dict[str, dict[str, float]]]:
    """By layout what this rank is told of the first step."""
    found = {}
    for name, layout in layouts.items():
        parallel = dict(layout)
        num_experts = parallel.pop("num_experts", 0)
        experts = {**EXPERTS, "expert_ffn_dim": 20, "num_shared_experts": 0}
        a_plan = plan(
            num_ranks,
            2 if "pp" in parallel else 1,
            experts=experts if num_experts else {},
            **parallel,
        )
        with open_mesh(a_plan.layout, device="cpu") as mesh:
            module = decoder(tied=False, dtype=torch.float64, num_experts=num_experts)
            model = parallelize(module, a_plan, mesh)
            optimizer = adamw(model)
            (batch,) = global_batches(1)
            size = BATCH // (a_plan.num_microbatches * a_plan.micro_batch_size)
            mine = share(batch, mesh.data_parallel_rank, size, a_plan.num_microbatches)
            sums = model.forward_backward(mine, OBJECTIVE)
            first = model.reduce_and_clip(sums, max_norm=MAX_NORM, by_block=BlockNormRequest(True))
            model.block_squares.hold_weights()
            model.update(optimizer)
            squares = model.block_squares.sum_update_squares(mesh.device)
            optimizer.zero_grad()
            second = model.reduce_and_clip(
                model.forward_backward(mine, OBJECTIVE),
                flags=(1.0,),
                by_block=BlockNormRequest(squares=squares),
            )
            assert second.flags == (float(num_ranks),)
            assert second.block_grad_norms == ()
            names = model.block_squares.names
            norms = [square**0.5 for square in second.block_squares]
            found[name] = {
                "gradients": dict(zip(names, first.block_grad_norms, strict=True)),
                "updates": dict(zip(names, norms[: len(names)], strict=True)),
                "weights": dict(zip(names, norms[len(names) :], strict=True)),
            }
    return found


@pytest.fixture(scope="module")
def references() -> dict[int, dict[str, dict[str, float]]]:
    return {number: run_ranks(1, compute_references, number)[0] for number in (0, 4)}


@pytest.mark.parametrize(
    ("num_ranks", "leave_out"),
    [
        pytest.param(2, (), marks=pytest.mark.long),
        # Copies of shards are also beside experts, and ZeRO-1 and tp apart elsewhere.
        pytest.param(4, ("hsdp",), id="4, few"),
        pytest.param(4, (), marks=pytest.mark.long),
    ],
)
def test_norms_of_blocks_are_those_of_one_process(
    num_ranks: int,
    leave_out: tuple[str, ...],
    references: dict[int, dict[str, dict[str, float]]],
) -> None:
    layouts = {name: layout for name, layout in LAYOUTS[num_ranks].items() if name not in leave_out}
    for of_rank in run_ranks(num_ranks, measure_norms, num_ranks, layouts):
        for name, layout in layouts.items():
            reference = references[layout.get("num_experts", 0)]
            for kind, norms in reference.items():
                assert of_rank[name][kind] == pytest.approx(norms, rel=1e-7), (name, kind)
