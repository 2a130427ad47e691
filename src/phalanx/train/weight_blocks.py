"""The blocks of weights that ranks hold, and which of them several ranks hold: these must have the
same bits on all of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

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
            for boxes, where in split_shard(shards[name]):
                key = hash_block_identity(shards[name], boxes)
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


def split_shard(shard: LogicalShard) -> list[tuple[tuple[Box, ...], tuple[slice, ...]]]:
    """(boxes, slices of the local storage) of the blocks of a shard; no slices: all of it."""
    # A block for each box where some are on more ranks than others, as heads of keys in a fused
    # matrix.
    if any(box.num_replicas > 1 for box in shard.boxes):
        return [((box,), box.slices_in_local_tensor) for box in shard.boxes]
    return [(shard.boxes, ())]


def hash_block_identity(shard: LogicalShard, boxes: Sequence[Box]) -> int:
    """A signed 64-bit number of a tensor's name and the boxes of it."""
    parts: list[object] = [shard.name, shard.dtype]
    for box in boxes:
        parts += (box.global_offset, box.size)
    return hash_to_signed_64_bits(*parts)


def hash_to_signed_64_bits(*parts: object) -> int:
    """A number from `parts` that an int64 holds, equal in every process and release."""
    number = hash_to_stable_64_bits(*parts)
    if number >= 1 << 63:
        return number - (1 << 64)
    return number


@dataclass(frozen=True)
class TensorsOnRanks:
    """Names of tensors, and the ranks on which something is true of any of them."""

    names: list[str]
    ranks: list[int]


# The (rank, column) of each rank that holds a block.
_Places: TypeAlias = list[tuple[int, int]]


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
        holders: dict[int, _Places] = defaultdict(list)
        for rank, names in enumerate(names_by_rank):
            for column in range(len(names)):
                holders[int(keys_by_rank[rank, column])].append((rank, column))
        self._shared = [places for places in holders.values() if len(places) > 1]
        self._pairs = _pair_places(self._shared)
        self.num_blocks, self.num_shared = len(holders), len(self._shared)
        """How many different blocks there are, and how many of them several ranks hold."""
        self._left_out: list[_Places] = []

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

    @property
    def num_left_out(self) -> int:
        return len(self._left_out)

    def leave_out_unequal(self, digests: NDArray[np.int64]) -> None:
        """From now on compare no block again that ranks hold otherwise than each other."""
        kept: list[_Places] = []
        for places in self._shared:
            is_equal = len({int(digests[place]) for place in places}) == 1
            (kept if is_equal else self._left_out).append(places)
        self._shared, self._pairs = kept, _pair_places(kept)
        self.num_shared = len(kept)

    def clear_left_out(self, digests: NDArray[np.int64]) -> NDArray[np.int64]:
        """`digests` with zeros for the blocks that are not compared."""
        cleared = digests.copy()
        for places in self._left_out:
            for place in places:
                cleared[place] = 0
        return cleared

    def find_tensors_on_ranks(self, mask: NDArray[np.bool_]) -> TensorsOnRanks:
        """The tensors and ranks of the blocks for which `mask` [ranks, blocks] is True."""
        names: dict[str, None] = {}
        ranks: set[int] = set()
        for rank, column in np.argwhere(mask).tolist():
            ranks.add(rank)
            names[self._names_by_rank[rank][column]] = None
        return TensorsOnRanks(list(names), sorted(ranks))


def _pair_places(shared: Sequence[_Places]) -> NDArray[np.int64]:
    """[pairs, 2, (rank, column)]: the first holder of each block with each of the others."""
    pairs = [(places[0], other) for places in shared for other in places[1:]]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2, 2)


def _find_indices_of_minority_digests(digests: list[int]) -> list[int]:
    """Places of the digests that most others do not have; of all where no digest is that of more
    than half."""
    (usual, count), *rarer_digests = Counter(digests).most_common()
    if not rarer_digests:
        return []
    if 2 * count <= len(digests):
        return list(range(len(digests)))
    return [digest_index for digest_index, digest in enumerate(digests) if digest != usual]


class NamedBlock(Protocol):
    """A block of a tensor of the model, or of what belongs to it."""

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> int: ...


@dataclass(frozen=True)
class HeldBlocks:
    """What all ranks hold: the blocks of `weights`, and those of the optimizer's `state` that
    several ranks should have. `num_state_alone`: blocks whose state one rank alone has."""

    weights: BlocksOfRanks
    state: BlocksOfRanks
    num_state_alone: int


@dataclass(frozen=True)
class GatheredBlocks:
    """`num_weight_columns`, `num_state_columns`: the blocks of the rank with most. `held`: None on
    other ranks than 0."""

    num_weight_columns: int
    num_state_columns: int
    held: HeldBlocks | None


def gather_block_lists(
    mesh: Mesh,
    names: Sequence[str],
    weights: Sequence[WeightBlock],
    state: Sequence[NamedBlock],
    num_state_alone: int,
) -> GatheredBlocks:
    """The blocks of all ranks. `names`: of all tensors that are compared, the same on all ranks of
    a stage; `state` is of some of them.

    Collective; waits for the device.
    """
    # Ranks of one stage of a pipeline have the same tensors: one of them names all.
    leaders = mesh.gather_json(list(names) if is_first_rank_of_stage(mesh) else None)
    own_counts = torch.tensor([len(weights), len(state), num_state_alone], device=mesh.device)
    counts = np.array([each.tolist() for each in mesh.all_gather(own_counts)], dtype=np.int64)
    num_weight_columns, num_state_columns, _ = map(int, counts.max(axis=0))
    places = {name: name_index for name_index, name in enumerate(names)}
    row = torch.zeros(3, num_weight_columns + num_state_columns, dtype=torch.int64)
    for column, block in enumerate(weights):
        row[0, column], row[1, column] = block.key, places[block.name]
        row[2, column] = block.is_trained
    for column, state_block in enumerate(state, num_weight_columns):
        row[0, column], row[1, column] = state_block.key, places[state_block.name]
    rows = mesh.all_gather(row.to(mesh.device))
    held = None
    if mesh.rank == 0:
        numbers = np.array([each.tolist() for each in rows], dtype=np.int64)
        names_of_ranks = _map_names_to_ranks(mesh, leaders)
        of_weights, of_state = np.split(numbers, [num_weight_columns], axis=2)
        held = HeldBlocks(
            _build_blocks_of_ranks(of_weights, counts[:, 0], names_of_ranks),
            _build_blocks_of_ranks(of_state, counts[:, 1], names_of_ranks),
            int(counts[:, 2].sum()),
        )
    return GatheredBlocks(num_weight_columns, num_state_columns, held)


def _map_names_to_ranks(mesh: Mesh, leaders: Sequence[list[str] | None]) -> list[list[str]]:
    """By rank the names of its stage's tensors, which the stage's leader has told."""
    stages = [mesh.layout.coordinates(rank)["pp"] for rank in range(mesh.world_size)]
    names_by_stage: dict[int, list[str]] = {}
    for stage, names_of_rank in zip(stages, leaders, strict=True):
        if names_of_rank is not None:
            names_by_stage[stage] = names_of_rank
    return [names_by_stage[stage] for stage in stages]


def _build_blocks_of_ranks(
    numbers: NDArray[np.int64], counts: NDArray[np.int64], names_of_ranks: list[list[str]]
) -> BlocksOfRanks:
    """`numbers`: [ranks, 3, blocks] of keys, places of names, and whether it is trained."""
    names_by_rank: list[list[str]] = []
    for places, count, names in zip(numbers[:, 1], counts, names_of_ranks, strict=True):
        names_by_rank.append([names[place] for place in places[:count]])
    return BlocksOfRanks(numbers[:, 0], names_by_rank, numbers[:, 2] != 0)
