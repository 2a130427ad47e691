"""Logical shards of plain modules, and the search for blocks. Those of DTensors: test_mesh."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models import Odd, OneBlockTwice, decoder
from phalanx.mesh.blocks import find_repeated_blocks
from phalanx.mesh.logical import (
    Box,
    ReplicaPosition,
    collect_module_shards,
    count_local_shard_bytes,
    full_name,
    get_dtype_name,
)


def test_names_shapes_and_storage_are_the_modules() -> None:
    module = decoder(tied=False, dtype=torch.float32)
    shards, aliases = collect_module_shards(module, ReplicaPosition(1, 4))
    assert set(shards) == {name for name, _ in module.named_parameters()}
    assert aliases == {}
    for name, parameter in module.named_parameters():
        shard, shape = shards[name], tuple(parameter.shape)
        assert shard.tensor.data_ptr() == parameter.data_ptr()  # a view, never a copy
        assert (shard.name, shard.global_shape, shard.dtype) == (name, shape, "float32")
        assert shard.boxes == (Box((0,) * len(shape), (0,) * len(shape), shape),)
        assert (shard.replica, shard.num_replicas) == (1, 4)
        assert shard.num_local == parameter.numel()
    assert count_local_shard_bytes(shards) == 4 * sum(p.numel() for p in module.parameters())


def test_tied_tensors_are_stored_once_and_buffers_only_if_persistent() -> None:
    shards, aliases = collect_module_shards(Odd())
    assert aliases == {"out.weight": "lookup.weight"}
    assert "out.weight" not in shards
    assert "scale" in shards
    assert "shift" not in shards


@pytest.mark.parametrize(
    "wrapper", ["_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."]
)
def test_names_never_contain_wrappers(wrapper: str) -> None:
    assert full_name(f"{wrapper}blocks.0.{wrapper}q.weight") == "blocks.0.q.weight"


def test_a_compiled_or_wrapped_module_keeps_its_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = nn.Sequential(nn.Linear(2, 2))
    wrapped = nn.Sequential(checkpoint_wrapper(inner[0]))
    assert set(collect_module_shards(wrapped)[0]) == {"0.weight", "0.bias"}
    compiled = nn.ModuleDict({"body": torch.compile(inner, backend="eager")})
    assert set(collect_module_shards(compiled)[0]) == {"body.0.weight", "body.0.bias"}


def test_a_shard_like_another_shares_its_blocks() -> None:
    shards, _ = collect_module_shards(nn.Linear(2, 3, bias=False), ReplicaPosition(0, 2))
    moment = shards["weight"].like("optim/weight/exp_avg", torch.zeros(3, 2, dtype=torch.float64))
    assert (moment.name, moment.dtype, moment.boxes) == (
        "optim/weight/exp_avg",
        "float64",
        shards["weight"].boxes,
    )
    assert moment.num_replicas == 2


def test_types_by_name() -> None:
    assert [get_dtype_name(t) for t in (torch.float32, torch.bfloat16, torch.int64)] == [
        "float32",
        "bfloat16",
        "int64",
    ]


def test_blocks_are_those_of_the_pattern() -> None:
    module = decoder(tied=True, dtype=torch.float32)
    assert find_repeated_blocks(module) == list(module.blocks)


def test_blocks_are_the_items_of_the_first_list_of_one_class() -> None:
    module = nn.Module()
    module.mixed = nn.ModuleList([nn.Linear(1, 1), nn.GELU()])
    module.single = nn.ModuleList([nn.Linear(1, 1)])
    module.inner = nn.Module()
    module.inner.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
    assert find_repeated_blocks(module) == list(module.inner.layers)
    assert find_repeated_blocks(Odd()) == []


def test_a_block_that_stands_in_two_places_is_one_block() -> None:
    assert len(find_repeated_blocks(OneBlockTwice())) == 1
