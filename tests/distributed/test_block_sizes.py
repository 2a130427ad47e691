"""Small buckets and blocks in ranks: more collectives, and the same weights.

Reference: the same layout with the usual sizes, for which one bucket holds the whole model.
"""

from __future__ import annotations

from typing import Any

import torch

from collectives import CountCollectives
from models import decoder, global_batches, plan, share
from phalanx.core.block_sizes import BlockSizes, shrink_block_sizes, use_block_sizes
from phalanx.mesh.logical import local_tensor
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.parallelize import parallelize
from ranks import run_ranks

RANKS, STEPS, MICROBATCHES, NUM_EXPERTS = 4, 2, 3, 4
EXPERTS = {"experts_per_token": 2, "expert_ffn_dim": 20}
OBJECTIVE = causal_cross_entropy(2048)
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 4},
    "ddp with a static graph": {"dp_replicate": 4, "static_graph": True},
    "zero1": {"dp_shard": 4, "zero_stage": 1},
    "zero1 of copies": {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 1},
    "pipeline of copies": {"pp": 2, "dp_replicate": 2},
    "ddp of experts": {"dp_replicate": 2, "cp": 2, "ep": 2},
    "tp and ring": {"tp": 2, "cp": 2},
    "ulysses": {"dp_replicate": 2, "cp": 2, "cp_attention": "ulysses"},
    "zero3": {"dp_shard": 4, "zero_stage": 3},
}
# Of these torch or phalanx reduces in buckets, or gathers updated weights in buckets.
WITH_BUCKETS = {
    name: "allreduce_" if "ddp" in name or "pipeline" in name else "broadcast_"
    for name in LAYOUTS
    if "ddp" in name or "pipeline" in name or "zero1" in name
}
Outcome = dict[str, tuple[dict[str, torch.Tensor], dict[str, int]]]


def train(rank: int, small: bool) -> Outcome:
    """Of each layout: this rank's weights after steps of plain descent, and the collectives of the
    last step by their operators."""
    sizes = BlockSizes()
    if small:
        sizes = shrink_block_sizes()
    with use_block_sizes(sizes):
        return {name: _train(rank, axes) for name, axes in LAYOUTS.items()}


def _train(rank: int, axes: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    num_experts = NUM_EXPERTS if "ep" in axes else 0
    a_plan = plan(RANKS, MICROBATCHES, num_experts=num_experts, experts=EXPERTS, **axes)
    with open_mesh(a_plan.layout, device="cpu") as mesh, CountCollectives() as collectives:
        module = decoder(tied=True, dtype=torch.float64, num_experts=num_experts)
        model = parallelize(module, a_plan, mesh)
        optimizer = torch.optim.SGD(list(model.parameters()), lr=0.5)
        for batch in global_batches(STEPS, documents=True):
            collectives.counts.clear()
            rows = share(
                batch,
                mesh.data_parallel_rank,
                a_plan.layout.data_parallel_size,
                a_plan.num_microbatches,
            )
            model.reduce_and_clip(model.forward_backward(rows, OBJECTIVE), max_norm=0.5)
            model.update(optimizer)
            optimizer.zero_grad()
        weights = {
            name: local_tensor(parameter).detach().clone()
            for name, parameter in model.module.named_parameters()
        }
        return weights, dict(collectives.counts)


def test_small_sizes_take_more_collectives_to_the_same_weights() -> None:
    usual, small = run_ranks(RANKS, train, False), run_ranks(RANKS, train, True)
    for rank_usual, rank_small in zip(usual, small, strict=True):
        for layout, (weights, counts) in rank_small.items():
            usual_weights, usual_counts = rank_usual[layout]
            assert set(weights) == set(usual_weights)
            for name, weight in weights.items():
                torch.testing.assert_close(
                    weight, usual_weights[name], rtol=1e-12, atol=1e-12, msg=f"{layout} {name}"
                )
            if layout in WITH_BUCKETS:
                operator = WITH_BUCKETS[layout]
                assert counts[operator] >= usual_counts[operator] + 3, (
                    layout,
                    counts,
                    usual_counts,
                )
