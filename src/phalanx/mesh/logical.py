"""LogicalShard: what part of which full-model tensor a rank holds. One language for optimizer, checkpoint, verify."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class Box:
    """A block of a tensor: where it stands in the full tensor, where in the local one, and its size per dimension.

    `replica` of `num_replicas`: several ranks that are no replicas of each other hold this block alike, while other
    blocks are their own (keys and values in a fused QKV, where there are more ranks than KV heads).
    """

    global_offset: tuple[int, ...]
    local_offset: tuple[int, ...]
    size: tuple[int, ...]
    replica: int = 0
    num_replicas: int = 1


@dataclass(frozen=True)
class LogicalShard:
    """This rank's part of the full-model tensor `name`.

    `tensor` is the local storage (never a copy), `boxes` say which blocks of the `global_shape` it holds.
    `replica` of `num_replicas`: ranks that hold the same boxes are numbered, so that each block is written once: of
    the replicas below `num_replicas` any may write it, the others never do.
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]
    tensor: torch.Tensor
    replica: int = 0
    num_replicas: int = 1

    @property
    def num_local(self) -> int:
        return sum(_volume(box.size) for box in self.boxes)

    def like(self, name: str, tensor: torch.Tensor) -> LogicalShard:
        """The same blocks of another tensor of this shape (an optimizer moment, say)."""
        return LogicalShard(
            name, self.global_shape, dtype_name(tensor.dtype), self.boxes, tensor, self.replica, self.num_replicas
        )


def _volume(size: Iterable[int]) -> int:
    volume = 1
    for length in size:
        volume *= length
    return volume


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> "float32"."""
    return str(dtype).removeprefix("torch.")


def full_name(name: str) -> str:
    """A parameter's name in the user's module, without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The storage on this rank of a plain or distributed tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_of(name: str, tensor: torch.Tensor, *, replica: int, num_replicas: int) -> LogicalShard:
    """The LogicalShard of `tensor`. `replica` counts the ranks that hold all of a plain tensor.

    A DTensor knows its own replication: its shard dimensions become one box, its replicate dimensions replicas.
    """
    local = local_tensor(tensor).detach()
    dtype = dtype_name(tensor.dtype)
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        box = Box((0,) * len(shape), (0,) * len(shape), shape)
        return LogicalShard(name, shape, dtype, (box,), local, replica, num_replicas)
    mesh, placements = tensor.device_mesh, tensor.placements
    size, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    boxes = (Box(tuple(offset), (0,) * len(size), tuple(size)),) if _volume(size) else ()
    replica = 0
    num_replicas = 1
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is outside the tensor's mesh"
    for placement, place, degree in zip(placements, coordinate, mesh.shape, strict=True):
        if placement.is_replicate():
            replica, num_replicas = replica * degree + place, num_replicas * degree
    return LogicalShard(name, tuple(tensor.shape), dtype, boxes, local, replica, num_replicas)


def module_shards(
    module: nn.Module, *, replica: int, num_replicas: int
) -> tuple[dict[str, LogicalShard], dict[str, str]]:
    """(shards of parameters and persistent buffers by full name, aliases of tied tensors -> stored name)."""
    shards: dict[str, LogicalShard] = {}
    aliases: dict[str, str] = {}
    seen: dict[int, str] = {}
    tensors: list[tuple[str, torch.Tensor]] = list(module.named_parameters(remove_duplicate=False))
    persistent = set(module.state_dict(keep_vars=True))
    tensors += [item for item in module.named_buffers() if item[0] in persistent]
    for raw_name, tensor in tensors:
        name = full_name(raw_name)
        if id(tensor) in seen:
            aliases[name] = seen[id(tensor)]
            continue
        seen[id(tensor)] = name
        # Buffers (running statistics) may differ between ranks; rank 0's are the model's: only replica 0 writes them.
        copies = num_replicas if isinstance(tensor, nn.Parameter | DTensor) else 1
        shards[name] = shard_of(name, tensor, replica=replica, num_replicas=copies)
    return shards, aliases


def local_bytes(shards: Mapping[str, LogicalShard]) -> int:
    """Bytes of storage this rank holds for `shards`."""
    return sum(shard.tensor.numel() * shard.tensor.element_size() for shard in shards.values())
