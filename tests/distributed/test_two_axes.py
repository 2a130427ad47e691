"""torch's own tensor parallelism under FSDP2, a layout to come: its tensors are saved and loaded
like all others."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from checkpoints import Tensors, load_shards, newest, save_shards
from phalanx.mesh.logical import ReplicaPosition, collect_module_shards
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.plan.layout import Layout
from ranks import run_ranks

SIZES = {"hybrid": (12, 8), "uneven": (11, 7)}


def new_module(size: tuple[int, int], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    wide, narrow = size
    parts = {
        "up": nn.Linear(narrow, wide),
        "down": nn.Linear(wide, narrow),
        "norm": nn.LayerNorm(narrow),
    }
    return nn.Sequential(OrderedDict(parts))


def cut(module: nn.Module, mesh: Mesh) -> nn.Module:
    """Columns and rows over tp, the norm on each of its ranks; and what that leaves of each
    tensor over dp_shard."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "norm": SequenceParallel()}
    parallelize_module(module, mesh.submesh("tp"), plan)
    fully_shard(module, mesh=mesh.submesh("dp_shard"))
    return module


def whole(module: nn.Module) -> Tensors:
    named = module.named_parameters()
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in named
    }


def save_and_load(rank: int, root: Path, kind: str) -> list[str]:
    """Loads what one rank saved, and saves what one rank is to load; which tensors were not
    restored."""
    with open_mesh(Layout(dp_shard=2, tp=2), device="cpu") as mesh:
        module = cut(new_module(SIZES[kind], seed=1), mesh)
        shards, _ = collect_module_shards(module, ReplicaPosition(rank, 4))
        save_shards(root / "four", 1, shards, mesh)
        load_shards(newest(root / "one"), shards, mesh)
        reference, found = whole(new_module(SIZES[kind], seed=2)), whole(module)
        return [name for name in reference if not torch.equal(found[name], reference[name])]


def one_saves(rank: int, root: Path, kind: str) -> None:
    with open_mesh(Layout(), device="cpu") as mesh:
        shards, _ = collect_module_shards(new_module(SIZES[kind], seed=2))
        save_shards(root / "one", 1, shards, mesh)


def one_loads(rank: int, root: Path, kind: str) -> list[str]:
    with open_mesh(Layout(), device="cpu") as mesh:
        module = new_module(SIZES[kind], seed=3)
        shards, _ = collect_module_shards(module)
        load_shards(newest(root / "four"), shards, mesh)
        reference, found = whole(new_module(SIZES[kind], seed=1)), whole(module)
        return [name for name in reference if not torch.equal(found[name], reference[name])]


@pytest.mark.parametrize("kind", list(SIZES))
def test_tensors_cut_along_two_axes_come_back(kind: str, tmp_path: Path) -> None:
    run_ranks(1, one_saves, tmp_path, kind)
    assert run_ranks(4, save_and_load, tmp_path, kind) == [[]] * 4
    assert run_ranks(1, one_loads, tmp_path, kind) == [[]]
