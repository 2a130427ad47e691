"""Sparse gradients of a call, which no list of modules tells of: ranks that reduce whole gradients
refuse them by the parameter's name, and add them up where they accumulate over microbatches.

Reference: the same lookup with dense gradients.
"""

from __future__ import annotations

import torch
from torch import nn

from models import VOCAB, global_batches, plan, share
from phalanx.core.errors import LayoutError
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.parallelize import parallelize
from ranks import run_ranks

OBJECTIVE = causal_cross_entropy(16)
LAYOUTS = {
    "zero1": {"dp_shard": 2, "zero_stage": 1},
    "ddp": {"dp_replicate": 2},
    "zero3": {"dp_shard": 2, "zero_stage": 3},
}
WHOLE = ("zero1", "ddp")


class Lookup(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.sparse = sparse
        self.rows = nn.Parameter(torch.linspace(-1.0, 1.0, VOCAB * 8).view(VOCAB, 8))
        self.out = nn.Linear(8, VOCAB)
        nn.init.constant_(self.out.weight, 0.1)
        nn.init.zeros_(self.out.bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(nn.functional.embedding(inputs, self.rows, sparse=self.sparse))


def train_one_step(
    rank: int, num_microbatches: int, sparse: bool, layouts: tuple[str, ...]
) -> dict[str, torch.Tensor | str]:
    """By layout the rows after a step, or what a rank is refused with."""
    found: dict[str, torch.Tensor | str] = {}
    for name in layouts:
        a_plan = plan(2, num_microbatches, **LAYOUTS[name])
        with open_mesh(a_plan.layout, device="cpu") as mesh:
            model = parallelize(Lookup(sparse=sparse), a_plan, mesh)
            sgd = torch.optim.SGD(model.parameters(), lr=1.0)
            batch = {key: global_batches(1)[0][key] for key in ("inputs", "targets")}
            mine = share(batch, rank, 2, num_microbatches)
            try:
                model.reduce_and_clip(model.forward_backward(mine, OBJECTIVE))
                model.update(sgd)
            except LayoutError as error:
                found[name] = str(error)
            else:
                found[name] = model.module.rows.detach().clone()
    return found


def test_a_sparse_gradient_of_a_call_is_refused_by_name() -> None:
    for found in run_ranks(2, train_one_step, 1, True, tuple(LAYOUTS)):
        assert set(found) == set(LAYOUTS)
        # FSDP tells of none by its name.
        names = {"zero3": "a parameter"}
        for layout, line in found.items():
            name = names.get(layout, "rows")
            assert f"the gradient of {name} is sparse: ranks reduce dense ones" in str(line)


def test_sparse_gradients_of_several_microbatches_add_up_to_dense_ones() -> None:
    expected, found = (run_ranks(2, train_one_step, 3, sparse, WHOLE) for sparse in (False, True))
    start = Lookup(sparse=False).rows
    for of_rank, dense in zip(found, expected, strict=True):
        assert set(of_rank) == set(WHOLE)
        for name, rows in of_rank.items():
            assert isinstance(rows, torch.Tensor), rows
            torch.testing.assert_close(rows, dense[name])
            assert not torch.equal(rows, start)
