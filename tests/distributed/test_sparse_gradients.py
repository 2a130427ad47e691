"""Sparse gradients of a call, which no list of modules tells of: ranks that reduce whole gradients
refuse them by the parameter's name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models import VOCAB, global_batches, plan, share
from phalanx.core.errors import LayoutError
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.parallelize import parallelize
from ranks import run_ranks

OBJECTIVE = causal_cross_entropy(16)
LAYOUTS = {"zero1": {"dp_shard": 2, "zero_stage": 1}, "ddp": {"dp_replicate": 2}}


class SparseLookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(VOCAB, 8))
        self.out = nn.Linear(8, VOCAB)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(nn.functional.embedding(inputs, self.rows, sparse=True))


def train_one_step(rank: int, num_microbatches: int) -> dict[str, str]:
    """What a rank is refused with, by layout."""
    found = {}
    for name, axes in LAYOUTS.items():
        a_plan = plan(2, num_microbatches, **axes)
        with open_mesh(a_plan.layout, device="cpu") as mesh:
            model = parallelize(SparseLookup(), a_plan, mesh)
            batch = {key: global_batches(1)[0][key] for key in ("inputs", "targets")}
            mine = share(batch, rank, 2, num_microbatches)
            try:
                model.reduce_and_clip(model.forward_backward(mine, OBJECTIVE))
            except LayoutError as error:
                found[name] = str(error)
    return found


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_a_sparse_gradient_of_a_call_is_refused_by_name(num_microbatches: int) -> None:
    for found in run_ranks(2, train_one_step, num_microbatches):
        assert set(found) == set(LAYOUTS)
        for line in found.values():
            assert "the gradient of rows is sparse: ranks reduce dense ones" in line
