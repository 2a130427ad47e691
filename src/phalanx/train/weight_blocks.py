"""The blocks of weights that ranks hold, and which of them several ranks hold: these must have the
same bits on all of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from phalanx.core.digest import hash_to_stable_64_bits
from phalanx.mesh.logical import Box, LogicalShard, full_name, get_local_tensor
from phalanx.mesh.mesh import Mesh
from phalanx.parallel.model import ParallelModel
from phalanx.train.pipeline_record import is_first_rank_of_stage


@dataclass(frozen=True)
class WeightBlock:
    """A block of the tensor `name` on this rank: `where` in its local storage (all of it if
    empty).

    `key` is the same on each rank that holds this block. `is_trained`: it is of a parameter that
    asks for a gradient.
    """

    name: str
    key: int
    where: tuple[slice, ...] = ()
    is_trained: bool = False


def list_weight_blocks(
    model: ParallelModel, tensors: Mapping[str, torch.Tensor]
) -> list[WeightBlock]:
    """The blocks that this rank holds of `tensors`, which `map_parameters_and_shared_buffers`
    gives."""
    shards = model.shards()
    blocks: list[WeightBlock] = []
    for name, tensor in tensors.items():
        # Of an uneven cut the last ranks may hold nothing.
        if name in shards and shards[name].boxes:
            for key, where in _list_shard_blocks(shards[name]):
                blocks.append(WeightBlock(name, key, where, tensor.requires_grad))
    return blocks


def map_parameters_and_shared_buffers(
    model: ParallelModel, alike: Mapping[str, nn.Module]
) -> dict[str, torch.Tensor]:
    """By full name: parameters of this rank's module as they are now, and the buffers of the
    modules `alike`."""
    # First, because it brings a sharded model to rest.
    model.named_parameters()
    tensors: dict[str, torch.Tensor] = {}
    for raw_name, parameter in model.module.named_parameters():
        tensors[full_name(raw_name)] = parameter
    for raw_name, part in alike.items():
        for buffer_name, buffer in part.named_buffers(recurse=False):
            tensors[full_name(f"{raw_name}.{buffer_name}")] = buffer
    return tensors


def find_modules_with_shared_buffers(module: nn.Module) -> dict[str, nn.Module]:
    """The modules whose buffers are the same on all ranks, by name."""
    return {
        name: part
        for name, part in module.named_modules()
        if getattr(part, "buffers_are_alike", False)
    }


def view_block_elements(block: WeightBlock, tensor: torch.Tensor) -> torch.Tensor:
    """The elements of `block` in the storage of this rank. A view."""
    return get_local_tensor(tensor.detach())[block.where]


def _list_shard_blocks(shard: LogicalShard) -> list[tuple[int, tuple[slice, ...]]]:
    """(key, slices) of the blocks of a shard."""
    # A block for each box where some are on more ranks than others, as heads of keys in a fused
    # matrix.
    if any(box.num_replicas > 1 for box in shard.boxes):
        return [
            (_hash_block_identity(shard, (box,)), _build_slices_of_box(box)) for box in shard.boxes
        ]
    return [(_hash_block_identity(shard, shard.boxes), ())]


def _hash_block_identity(shard: LogicalShard, boxes: Sequence[Box]) -> int:
    """A signed 64-bit number of a tensor's name and the boxes of it."""
    parts: list[object] = [shard.name, shard.dtype]
    for box in boxes:
        parts += (box.global_offset, box.size)
    number = hash_to_stable_64_bits(*parts)
    if number >= 1 << 63:
        return number - (1 << 64)
    return number


def _build_slices_of_box(box: Box) -> tuple[slice, ...]:
    return tuple(
        slice(offset, offset + size)
        for offset, size in zip(box.local_offset, box.size, strict=True)
    )


@dataclass(frozen=True)
class TensorsOnRanks:
    """Names of tensors, and the ranks on which something is true of any of them."""

    names: list[str]
    ranks: list[int]


class BlocksOfRanks:
    """The blocks of all ranks, and which of them are the same.

    `keys_by_rank`: [ranks, blocks], of ranks with fewer blocks zeros at the end; `names_by_rank`:
    the tensor of each block. `num_trained`: tensors that ask for a gradient.
    """

    def __init__(
        self,
        keys_by_rank: NDArray[np.int64],
        names_by_rank: list[list[str]],
        is_trained: NDArray[np.bool_],
    ) -> None:
        self._names_by_rank = names_by_rank
        self.num_trained = len(self.find_tensors_on_ranks(is_trained).names)
        holders: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for rank, names in enumerate(names_by_rank):
            for column in range(len(names)):
                holders[int(keys_by_rank[rank, column])].append((rank, column))
        self._shared = [places for places in holders.values() if len(places) > 1]
        pairs = [(places[0], block_index) for places in self._shared for block_index in places[1:]]
        self._pairs = np.array(pairs, dtype=np.int64).reshape(-1, 2, 2)
        self.num_blocks, self.num_shared = len(holders), len(self._shared)
        """How many different blocks there are, and how many of them several ranks hold."""

    def find_tensors_unequal_on_ranks(self, digests: NDArray[np.int64]) -> TensorsOnRanks:
        """Tensors that ranks hold otherwise than most that hold the same block; without a
        majority, on all that hold it. `digests`: [ranks, blocks]."""
        is_blamed = np.zeros(digests.shape, dtype=bool)
        first, other = self._pairs[:, 0], self._pairs[:, 1]
        if not (digests[first[:, 0], first[:, 1]] == digests[other[:, 0], other[:, 1]]).all():
            for places in self._shared:
                for index in _find_indices_of_minority_digests(
                    [int(digests[block_index]) for block_index in places]
                ):
                    is_blamed[places[index]] = True
        return self.find_tensors_on_ranks(is_blamed)

    def find_tensors_on_ranks(self, mask: NDArray[np.bool_]) -> TensorsOnRanks:
        """The tensors and ranks of the blocks for which `mask` [ranks, blocks] is True."""
        names: dict[str, None] = {}
        ranks: set[int] = set()
        for rank, column in np.argwhere(mask).tolist():
            ranks.add(rank)
            names[self._names_by_rank[rank][column]] = None
        return TensorsOnRanks(list(names), sorted(ranks))


def _find_indices_of_minority_digests(digests: list[int]) -> list[int]:
    """Places of the digests that most others do not have; of all where no digest is that of more
    than half."""
    (usual, count), *rarer_digests = Counter(digests).most_common()
    if not rarer_digests:
        return []
    if 2 * count <= len(digests):
        return list(range(len(digests)))
    return [digest_index for digest_index, digest in enumerate(digests) if digest != usual]


def gather_block_lists(
    mesh: Mesh, names: Sequence[str], blocks: Sequence[WeightBlock]
) -> tuple[int, BlocksOfRanks | None]:
    """The number of blocks of the rank with most, and on rank 0 the blocks of all ranks. `names`:
    of all tensors that are compared, the same on all ranks of a stage.

    Collective; waits for the device.
    """
    # Ranks of one stage of a pipeline have the same tensors: one of them names all.
    leaders = mesh.gather_json(list(names) if is_first_rank_of_stage(mesh) else None)
    counts = [
        int(count) for count in mesh.all_gather(torch.tensor([len(blocks)], device=mesh.device))
    ]
    places = {name: name_index for name_index, name in enumerate(names)}
    row = torch.zeros(3, max(counts), dtype=torch.int64)
    for column, block in enumerate(blocks):
        row[0, column], row[1, column] = block.key, places[block.name]
        row[2, column] = block.is_trained
    rows = mesh.all_gather(row.to(mesh.device))
    if mesh.rank != 0:
        return max(counts), None
    stages = [mesh.layout.coordinates(rank)["pp"] for rank in range(mesh.world_size)]
    names_by_stage: dict[int, list[str]] = {}
    for stage, names_of_rank in zip(stages, leaders, strict=True):
        if names_of_rank is not None:
            names_by_stage[stage] = names_of_rank
    names_by_rank: list[list[str]] = []
    for stage, count, each in zip(stages, counts, rows, strict=True):
        names_by_rank.append(
            [names_by_stage[stage][name_index] for name_index in each[1, :count].tolist()]
        )
    numbers = np.array([each.tolist() for each in rows], dtype=np.int64)
    return max(counts), BlocksOfRanks(numbers[:, 0], names_by_rank, numbers[:, 2] != 0)
