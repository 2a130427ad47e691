"""Modules whose tensors are DTensors already are refused, and the reason says what torch loses."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import phalanx
from phalanx.core.errors import LayoutError
from phalanx.mesh.dtensors import count_rows_lost_by_flat_gather, explain_rows_lost_by_gather
from ranks import run_ranks

SIZES = (2, 3, 5, 6, 8)
MENDED = (
    "torch gathers an uneven cut over a flattened mesh dimension otherwise than 2.13 does"
    " (pytorch#194457): if it is mended, take the warning out of mesh/dtensors.py and"
    " examples/found/flattened_gather.py off docs/found.md"
)


def _gather(rank: int, shape: tuple[int, ...]) -> list[tuple[int, bool, bool, bool]]:
    """For each size: it, whether a gather is right before the mesh is flattened, whether after,
    and whether one mesh dimension at a time."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    names = tuple("abc"[: len(shape)])
    plain = init_device_mesh("cpu", shape, mesh_dim_names=names)
    flattened = init_device_mesh("cpu", shape, mesh_dim_names=names)
    flattened._flatten("flat")
    outcomes = []
    for size in SIZES:
        full = torch.arange(1.0, 3 * size + 1).reshape(size, 3)
        placements = [Shard(0)] * len(shape)
        before = distribute_tensor(full, plain, placements).full_tensor()
        sharded = distribute_tensor(full, flattened, placements)
        after, stepwise = sharded.full_tensor(), sharded
        for mesh_dim in reversed(range(len(shape))):
            placements[mesh_dim] = Replicate()
            stepwise = stepwise.redistribute(placements=placements)
        right = [bool(each.equal(full)) for each in (before, after, stepwise.to_local())]
        assert (
            explain_rows_lost_by_gather(sharded) or count_rows_lost_by_flat_gather(size, shape) == 0
        )
        outcomes.append((size, *right))
    return outcomes


def test_a_flattened_gather_loses_the_rows_that_the_warning_counts() -> None:
    shape = (2, 2)
    for outcomes in run_ranks(4, _gather, shape):
        for size, before, after, stepwise in outcomes:
            assert before, "a mesh without a flattened dimension"
            assert stepwise, "the way out that the warning names"
            assert after == (count_rows_lost_by_flat_gather(size, shape) == 0), (
                f"{size} rows: {MENDED}"
            )


@pytest.mark.parametrize(
    ("size", "degrees", "lost"),
    [(5, (2, 2), 1), (6, (2, 2), 1), (8, (2, 2), 0), (7, (2, 2), 0), (9, (2, 2, 2), 3)],
)
def test_rows_are_lost_where_two_cuts_are_not_one(
    size: int, degrees: tuple[int, ...], lost: int
) -> None:
    assert count_rows_lost_by_flat_gather(size, degrees) == lost


class _Sharded(nn.Module):
    def __init__(self, *weights: DTensor) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)


def _refuse(rank: int) -> list[str]:
    plan = phalanx.make_plan(phalanx.load_job(overrides=["parallel.dp_shard=4"]))
    messages = []
    with phalanx.open_mesh(plan.layout, device="cpu") as mesh:
        own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        even, uneven = (
            distribute_tensor(torch.ones(size, 3), own, [Shard(0), Shard(0)]) for size in (8, 5)
        )
        for module in (_Sharded(even, uneven), _Sharded(even)):
            with pytest.raises(LayoutError) as refusal:
                phalanx.parallelize(module, plan, mesh)
            messages.append(str(refusal.value))
    return messages


def test_a_module_of_dtensors_is_refused_with_what_a_gather_would_lose() -> None:
    (lossy, even), *_ = run_ranks(4, _refuse)
    assert lossy.startswith("weights.1 is a DTensor already ([5, 3], S(0) over the 2 ranks of")
    assert "mesh dimension dp" in lossy
    assert "loses 1 of the 5 rows of dimension 0" in lossy
    assert "pytorch#194457" in lossy
    assert "one mesh dimension at a time" in lossy
    assert even.startswith("weights.0 is a DTensor already")
    assert "194457" not in even
    assert "shard_rules" in even
