"""Tensors and ranks that are not there: what a dry run (verify/dry_run) is made of.

A fake tensor has a form and a type, and no numbers. Of a fake process group one rank is in this
process, and what it says goes nowhere.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from phalanx.mesh import counter_rng, logical
from phalanx.mesh.device_meshes import clear_device_mesh_cache
from phalanx.mesh.logical import get_local_tensor
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.mesh.shared_memory.opening import CollectivesChoice, assuming_shared_memory
from phalanx.plan.layout import Layout


def is_fake_tensor(tensor: torch.Tensor) -> bool:
    """True for a tensor without numbers: nobody can read what is in it."""
    return isinstance(get_local_tensor(tensor), FakeTensor)


def has_fake_parameters(module: nn.Module) -> bool:
    """True for a module whose parameters have no numbers."""
    return any(is_fake_tensor(parameter) for parameter in module.parameters())


@contextlib.contextmanager
def open_fake_mesh(
    layout: Layout, rank: int, collectives: CollectivesChoice = "auto"
) -> Iterator[Mesh]:
    """The Mesh of one rank of `layout`, on the CPU; the other ranks are not there.

    What it sends is lost, and what it receives is whatever memory held. Unless `collectives` is
    "gloo" it calls what it would if all ranks were on this host.
    """
    if layout.world_size == 1:
        with open_mesh(layout, device="cpu") as mesh:
            yield mesh
        return
    # A part of torch's own tests, and what its documents name for this.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        with assuming_shared_memory(collectives != "gloo"), open_mesh(layout, device="cpu") as mesh:
            yield mesh
    finally:
        clear_device_mesh_cache()
        dist.destroy_process_group()


@contextlib.contextmanager
def hiding_placement_arithmetic_from_modes() -> Iterator[None]:
    """Inside, forms and places are worked out where no mode sees it.

    For forms of results DTensor computes with tensors of the global shape, which a follower of
    memory would count; for places it and dropout read small tensors, which would have no numbers.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    asides = (
        (ShardingPropagator, "_propagate_tensor_meta_non_cached"),
        (logical, "compute_local_shape_and_global_offset"),
        (counter_rng, "_split_box_into_element_runs"),
        (DeviceMesh, "__getitem__"),
        (DeviceMesh, "_flatten"),
    )
    with contextlib.ExitStack() as stack:
        for owner, name in asides:
            function = getattr(owner, name)
            stack.callback(setattr, owner, name, function)
            setattr(owner, name, _disable_modes_during(function))
        stack.callback(setattr, _fsdp_param, _TORCH_CHUNK, getattr(_fsdp_param, _TORCH_CHUNK))
        setattr(_fsdp_param, _TORCH_CHUNK, _LazyTensorChunks)
        yield


_TORCH_CHUNK = "_chunk_with_empty"


class _LazyTensorChunks:
    """The chunks of a tensor, each made when it is asked for: FSDP makes those of all ranks to take
    its own."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._num_chunks, self._dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self._num_chunks

    def __getitem__(self, index: int) -> torch.Tensor:
        size = self._tensor.size(self._dim)
        # As torch.chunk cuts: all chunks but the last ones are of one length.
        length = -(-size // self._num_chunks)
        start = min(index * length, size)
        return self._tensor.narrow(self._dim, start, min(length, size - start))


def _disable_modes_during(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call
