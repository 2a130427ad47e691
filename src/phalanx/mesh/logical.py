"""LogicalShard: what part of which full-model tensor a rank holds.

One language for optimizer, checkpoint, verify.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_WRAPPER_NAME_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class Box:
    """A block of a tensor: where it stands in the full tensor, where in the local one, and its size
    per dimension.

    `replica` of `num_replicas`: several ranks that are no replicas of each other hold this block
    alike, while other blocks are their own (keys and values in a fused QKV, where there are more
    ranks than KV heads).
    """

    global_offset: tuple[int, ...]
    local_offset: tuple[int, ...]
    size: tuple[int, ...]
    replica: int = 0
    num_replicas: int = 1

    @property
    def slices_in_full_tensor(self) -> tuple[slice, ...]:
        """The slices of the full tensor in which the block stands."""
        return tuple(
            slice(start, start + length)
            for start, length in zip(self.global_offset, self.size, strict=True)
        )

    @property
    def slices_in_local_tensor(self) -> tuple[slice, ...]:
        """The slices of the local tensor in which the block stands."""
        return tuple(
            slice(start, start + length)
            for start, length in zip(self.local_offset, self.size, strict=True)
        )


# A plain local tensor and this table, because DTensor knows one contiguous cut per mesh dimension,
# no fused QKV and no key head on two ranks, and mixes badly with plain tensors in optimizers and
# clipping. What data parallelism cuts besides, only a LogicalShard puts together with it.
@dataclass(frozen=True)
class TensorParallelCut:
    """The blocks of a full tensor that a tensor-parallel rank's local tensor consists of.

    Local offsets are in that local tensor.

    A block that several of the ranks hold alike says so itself.
    """

    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    ep: int = 1
    """Groups of tensor-parallel ranks that have cut it between them, too: neighbours, as those
    ranks are."""


@dataclass(frozen=True)
class LogicalShard:
    """This rank's part of the full-model tensor `name`.

    `tensor` is the local storage (never a copy), `boxes` say which blocks of the `global_shape` it
    holds. `replica` of `num_replicas`: ranks that hold the same boxes are numbered, so that each
    block is written once: of the replicas below `num_replicas` any may write it, the others never
    do.
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
        return sum(_count_elements_of_size(box.size) for box in self.boxes)

    def like(self, name: str, tensor: torch.Tensor) -> LogicalShard:
        """The same blocks of another tensor of this shape (an optimizer moment, say)."""
        return LogicalShard(
            name,
            self.global_shape,
            get_dtype_name(tensor.dtype),
            self.boxes,
            tensor,
            self.replica,
            self.num_replicas,
        )


def _count_elements_of_size(size: Iterable[int]) -> int:
    volume = 1
    for length in size:
        volume *= length
    return volume


def get_dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> "float32"."""
    return str(dtype).removeprefix("torch.")


def full_name(name: str) -> str:
    """A parameter's name in the user's module, without what wrappers put into it."""
    for wrapper in _WRAPPER_NAME_PREFIXES:
        name = name.replace(wrapper, "")
    return name


def get_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The storage on this rank of a plain or distributed tensor."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def share_first_element(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if two tensors begin at the same element of one storage; fake tensors have no address to
    be compared."""
    storages = first.untyped_storage(), second.untyped_storage()
    return (
        storages[0]._cdata == storages[1]._cdata
        and first.storage_offset() * first.element_size()
        == second.storage_offset() * second.element_size()
    )


def make_logical_shard(
    name: str, tensor: torch.Tensor, *, replica: int, num_replicas: int
) -> LogicalShard:
    """The LogicalShard of `tensor`. `replica` counts the ranks that hold all of a plain tensor.

    A DTensor knows its own replication: its shard dimensions become one box, its replicate
    dimensions replicas.
    """
    local = get_local_tensor(tensor).detach()
    dtype = get_dtype_name(tensor.dtype)
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        box = Box((0,) * len(shape), (0,) * len(shape), shape)
        return LogicalShard(name, shape, dtype, (box,), local, replica, num_replicas)
    mesh, placements = tensor.device_mesh, tensor.placements
    size, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    boxes: tuple[Box, ...] = ()
    # Of an uneven cut the last ranks may hold nothing.
    if _count_elements_of_size(size):
        boxes = (Box(tuple(offset), (0,) * len(size), tuple(size)),)
    replica = 0
    num_replicas = 1
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is outside the tensor's mesh"
    for placement, position, degree in zip(placements, coordinate, mesh.shape, strict=True):
        if placement.is_replicate():
            replica, num_replicas = replica * degree + position, num_replicas * degree
    return LogicalShard(name, tuple(tensor.shape), dtype, boxes, local, replica, num_replicas)


def apply_cut_to_shard(cut: TensorParallelCut, shard: LogicalShard) -> LogicalShard:
    """`shard` says what this rank holds of a local tensor, and `cut` what that is of the full
    one: both together."""
    boxes = []
    for part in cut.boxes:
        for box_of_shard in shard.boxes:
            box = _intersect_boxes(part, box_of_shard)
            if box is not None:
                boxes.append(box)
    return replace(shard, global_shape=cut.global_shape, boxes=tuple(boxes))


def _intersect_boxes(part: Box, stored: Box) -> Box | None:
    """The elements that `part` (local -> full) and `stored` (stored -> local) have in common
    (stored -> full)."""
    global_offset, local_offset, size = [], [], []
    for dim in range(len(part.size)):
        part_start, stored_start = part.local_offset[dim], stored.global_offset[dim]
        start = max(part_start, stored_start)
        stop = min(part_start + part.size[dim], stored_start + stored.size[dim])
        if stop <= start:
            return None
        global_offset.append(part.global_offset[dim] + start - part_start)
        local_offset.append(stored.local_offset[dim] + start - stored_start)
        size.append(stop - start)
    return Box(
        tuple(global_offset), tuple(local_offset), tuple(size), part.replica, part.num_replicas
    )


@dataclass(frozen=True)
class ReplicaPosition:
    """A rank's position among those that hold the same: `rank` of the `num_ranks` that hold what
    is not cut at all, of which the `tp` of one tensor-parallel group are neighbours.

    `cuts` says by full name what those have cut.
    """

    rank: int = 0
    num_ranks: int = 1
    cuts: Mapping[str, TensorParallelCut] = field(default_factory=dict)
    tp_rank: int = 0
    tp: int = 1
    copies: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Name -> (which, of how many) where several pipeline stages hold a tensor: each of them so
    many times."""

    def shard(self, name: str, tensor: torch.Tensor, *, is_alike: bool = True) -> LogicalShard:
        """This rank's shard of the full-model tensor `name`.

        `is_alike` False: only rank 0's counts.
        """
        shard = self._make_shard_within_stage(name, tensor, is_alike=is_alike)
        which, how_many = self.copies.get(name, (0, 1))
        return replace(
            shard,
            replica=which * shard.num_replicas + shard.replica,
            num_replicas=how_many * shard.num_replicas,
        )

    def _make_shard_within_stage(
        self, name: str, tensor: torch.Tensor, *, is_alike: bool
    ) -> LogicalShard:
        cut = self.cuts.get(name)
        if cut is not None:
            share = self.tp * cut.ep
            replicas = {"replica": self.rank // share, "num_replicas": self.num_ranks // share}
            return apply_cut_to_shard(cut, make_logical_shard(name, tensor, **replicas))
        num_replicas = self.num_ranks
        if not is_alike:
            num_replicas = 1
        shard = make_logical_shard(name, tensor, replica=self.rank, num_replicas=num_replicas)
        if not isinstance(tensor, DTensor) or self.tp == 1:
            return shard
        # The mesh of a DTensor has no tp in it, and ranks of tp hold alike what no rule cuts.
        replica, num_replicas = shard.replica * self.tp + self.tp_rank, shard.num_replicas * self.tp
        return replace(shard, replica=replica, num_replicas=num_replicas)


def collect_module_shards(
    module: nn.Module, position: ReplicaPosition | None = None
) -> tuple[dict[str, LogicalShard], dict[str, str]]:
    """(shards of parameters and persistent buffers by full name, aliases of tied tensors ->
    stored name)."""
    position = position or ReplicaPosition()
    shards: dict[str, LogicalShard] = {}
    aliases: dict[str, str] = {}
    stored_names: dict[int, str] = {}
    # With duplicates: the further names of a tied tensor become aliases.
    tensors: list[tuple[str, torch.Tensor]] = list(module.named_parameters(remove_duplicate=False))
    persistent = set(module.state_dict(keep_vars=True))
    tensors += [item for item in module.named_buffers() if item[0] in persistent]
    for raw_name, tensor in tensors:
        name = full_name(raw_name)
        if id(tensor) in stored_names:
            aliases[name] = stored_names[id(tensor)]
            continue
        stored_names[id(tensor)] = name
        # Buffers (running statistics) may differ between ranks; rank 0's are the model's: only
        # replica 0 writes them.
        shards[name] = position.shard(
            name, tensor, is_alike=isinstance(tensor, nn.Parameter | DTensor)
        )
    return shards, aliases


def count_local_shard_bytes(shards: Mapping[str, LogicalShard]) -> int:
    """Bytes of storage this rank holds for `shards`."""
    return sum(shard.tensor.numel() * shard.tensor.element_size() for shard in shards.values())
