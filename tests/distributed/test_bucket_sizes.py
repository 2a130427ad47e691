"""Small buckets: more collectives, and the same weights.

Reference: the same layout with the usual size, for which one bucket holds the whole model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collectives import CountCollectives
from models import decoder, global_batches, plan, share
from phalanx.core.block_sizes import BlockSizes, use_block_sizes
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.parallelize import parallelize
from ranks import run_ranks

RANKS, STEPS, NUM_EXPERTS = 4, 3, 4
EXPERTS = {"experts_per_token": 2, "expert_ffn_dim": 20}
OBJECTIVE = causal_cross_entropy(2048)
# What each reduces, or gathers, in buckets with.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("allreduce_", {"dp_replicate": 4}),
    "ddp with a static graph": ("allreduce_", {"dp_replicate": 4, "static_graph": True}),
    "zero1 of copies": ("broadcast_", {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 1}),
    "pipeline of copies": ("allreduce_", {"pp": 2, "dp_replicate": 2}),
    "experts of copies": ("allreduce_", {"dp_replicate": 2, "cp": 2, "ep": 2}),
}
# The buckets of the others are DDP's, too.
FEW = ("ddp with a static graph", "zero1 of copies", "experts of copies")
Outcome = tuple[dict[str, torch.Tensor], dict[str, int]]


def train(rank: int, names: tuple[str, ...]) -> dict[str, tuple[Outcome, Outcome]]:
    """By layout, with buckets of the usual size and with small ones."""
    found = {}
    for name in names:
        _, axes = LAYOUTS[name]
        usual = _train(axes)
        with use_block_sizes(BlockSizes(bucket_bytes=2053)):
            found[name] = usual, _train(axes)
    return found


def _train(axes: dict[str, Any]) -> Outcome:
    """(this rank's weights after steps of plain descent, collectives of the last step by their
    operators)."""
    num_experts = NUM_EXPERTS if "ep" in axes else 0
    a_plan = plan(RANKS, num_experts=num_experts, experts=EXPERTS, **axes)
    num_ranks, num_microbatches = a_plan.layout.data_parallel_size, a_plan.num_microbatches
    with open_mesh(a_plan.layout, device="cpu", collectives="gloo") as mesh:
        module = decoder(tied=True, dtype=torch.float64, num_experts=num_experts)
        model = parallelize(module, a_plan, mesh)
        optimizer = torch.optim.SGD(list(model.parameters()), lr=0.5)
        # DDP has one bucket until it has seen in which order gradients come: the first step, of a
        # static graph the second, too.
        for batch in global_batches(STEPS):
            rows = share(batch, mesh.data_parallel_rank, num_ranks, num_microbatches)
            with CountCollectives() as collectives:
                model.reduce_and_clip(model.forward_backward(rows, OBJECTIVE), max_norm=0.5)
                model.update(optimizer)
            optimizer.zero_grad()
        weights = {name: p.detach().clone() for name, p in model.module.named_parameters()}
        return weights, collectives.counts


@pytest.mark.parametrize(
    "names", [FEW, pytest.param(tuple(LAYOUTS), marks=pytest.mark.long)], ids=["few", "all"]
)
def test_small_buckets_take_more_collectives_to_the_same_weights(names: tuple[str, ...]) -> None:
    for rank_found in run_ranks(RANKS, train, names):
        for layout, (usual, small) in rank_found.items():
            assert small[0].keys() == usual[0].keys()
            for name, weight in small[0].items():
                torch.testing.assert_close(weight, usual[0][name], rtol=1e-12, atol=1e-12)
            operator, _ = LAYOUTS[layout]
            assert small[1][operator] >= usual[1][operator] + 3, layout
