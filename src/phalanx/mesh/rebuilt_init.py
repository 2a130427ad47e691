"""Modules whose building cannot be recorded: ranks of a machine build them one at a time.

A rank builds the module whole, in its turn, and keeps all but its parameters' memory. When it knows
which parts are its own it builds the module once more, in its turn again, and copies these. So a
machine holds one whole module at a time, and not one for each rank.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from phalanx.core.errors import LayoutError
from phalanx.mesh.logical import LogicalShard, full_name
from phalanx.mesh.recorded_init import set_initial_values_of_module

OpenTurn = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class RebuiltInitialization:
    """The values that building the module again gives."""

    build: Callable[[], nn.Module]
    open_turn: OpenTurn
    digest: str

    def fill_parameter_shards(self, shards: Mapping[str, LogicalShard]) -> None:
        """Fill those of `shards` that are parameters. Needs memory for the whole module, for which
        it waits until other ranks of the machine have none.

        Raises LayoutError if the module has other weights than the first time.
        """
        with self.open_turn():
            module = self.build()
            if hash_parameters(module) != self.digest:
                raise LayoutError(
                    f"{type(module).__name__} has other weights when it is built again",
                    why="a large module that cannot be built without memory is built twice",
                    fix="make its weights a function of the random state that it finds",
                )
            for name, parameter in module.named_parameters(remove_duplicate=False):
                shard = shards.get(full_name(name))
                for box in shard.boxes if shard is not None else ():
                    values = parameter.detach()[box.slices_in_full_tensor]
                    shard.tensor[box.slices_in_local_tensor].copy_(values)  # type: ignore[union-attr]
            del module, parameter
            gc.collect()


def build_module_in_turn(build: Callable[[], nn.Module], open_turn: OpenTurn) -> nn.Module:
    """The module of `build` with parameters on the meta device, which are filled by building it
    again; or, where something else than the module holds its parameters, as it was built.

    `open_turn`: a context that one process of a machine is in at a time.
    """
    with open_turn():
        module = build()
        if not _can_lose_parameters(module):
            return module
        digest = hash_parameters(module)
        storages = [StorageWeakRef(each.untyped_storage()) for each in module.parameters()]
        _replace_parameters_by_meta(module)
        gc.collect()
        if not all(storage.expired() for storage in storages):
            # A list beside the module, say, whose tensors would no longer be those that train.
            return build()
    set_initial_values_of_module(module, RebuiltInitialization(build, open_turn, digest))
    return module


def hash_parameters(module: nn.Module) -> str:
    """XXH3 over names, shapes, types and bytes of every parameter."""
    hasher = xxhash.xxh3_64()
    for name, parameter in module.named_parameters():
        hasher.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        as_bytes = parameter.detach().contiguous().flatten().view(torch.uint8)
        hasher.update(as_bytes.cpu().numpy().data)
    return hasher.hexdigest()


def _can_lose_parameters(module: nn.Module) -> bool:
    """False for parameters that are no plain tensors in memory, or share theirs with others."""
    storages: set[int] = set()
    parameters = list(module.parameters())
    for parameter in parameters:
        if type(parameter) is not nn.Parameter or parameter.is_meta:
            return False
        storages.add(parameter.untyped_storage().data_ptr())
    is_shared = any(buffer.untyped_storage().data_ptr() in storages for buffer in module.buffers())
    return len(storages) == len(parameters) and not is_shared


def _replace_parameters_by_meta(module: nn.Module) -> None:
    """Put parameters on meta in the places of those of `module`, which it then holds no longer."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is None:
                continue
            if parameter not in replaced:
                new: Any = nn.Parameter(
                    torch.empty_like(parameter, device="meta"),
                    requires_grad=parameter.requires_grad,
                )
                new.__dict__.update(parameter.__dict__)
                replaced[parameter] = new
            part._parameters[name] = replaced[parameter]
