"""Gathers and reduce-scatters of tensors that other ranks read where they lie.

A rank says where its tensors are, by a table in its arena; what lies elsewhere than in memory that
others see it copies behind the table. Nobody may change what it has said before all have read it:
such an operation ends on every rank when all of them have. Tensors that nobody changes for a while
need none of this: ranks tell once where they lie (`PlacesOfAllRanks`), and then read them without
waiting for anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from phalanx.core.block_sizes import get_block_sizes
from phalanx.mesh.shared_memory.arena import Bytes
from phalanx.mesh.shared_memory.reduction import DTYPES, reduce_into
from phalanx.mesh.shared_memory.tensors import view_bytes
from phalanx.mesh.shared_memory.transfers import GroupMemory, Transfer

# Tells where a tensor lies that other ranks see, and None of others.
Locate = Callable[[torch.Tensor], int | None]

_ENTRY_BYTES = 16
_ALIGNMENT = 64
_NO_BYTES = np.zeros(0, np.uint8)


@dataclass(frozen=True)
class GatheredTensor:
    """A tensor of which each rank of a group has a part, and where the parts are to come.

    `source`: what this rank shows the others, contiguous. `rows[r]` becomes what begins at element
    `starts[r]` of the source of rank r, and may be of another type.
    """

    source: torch.Tensor
    rows: Sequence[torch.Tensor]
    starts: Sequence[int]


class _ShownTensors:
    """The tensors that this rank shows, as its operand: (place, bytes) of each, and behind them
    copies of those that others do not see. A copy has no place yet: minus its offset stands for
    it."""

    def __init__(self, sources: Sequence[torch.Tensor], locate: Locate) -> None:
        self._table = np.zeros((len(sources), 2), np.int64)
        self._copies: list[tuple[int, Bytes]] = []
        self.num_bytes = _round_up(len(sources) * _ENTRY_BYTES)
        for entry, source in zip(self._table, sources, strict=True):
            place = locate(source)
            if place is None:
                place = -self.num_bytes
                self._copies.append((self.num_bytes, view_bytes(source)))
                self.num_bytes += _round_up(source.nbytes)
            entry[:] = place, source.nbytes

    def write(self, block: Bytes) -> None:
        table = self._table.reshape(-1).view(np.uint8)
        np.copyto(block[: len(table)], table)
        for start, values in self._copies:
            np.copyto(block[start : start + len(values)], values)


class PlacesOfAllRanks:
    """Where the ranks of a group have tensors that each of them has, while nobody changes them.

    `table` [ranks, tensors, 2]: the place and the bytes of each; place `ELSEWHERE` of one that
    others do not see.
    """

    ELSEWHERE = -1

    def __init__(self, table: Sequence[Sequence[Sequence[int]]]) -> None:
        self._table = table
        self._is_seen = [
            all(place > 0 for place, _ in entries) for entries in zip(*table, strict=True)
        ]

    def are_seen(self, indices: Sequence[int]) -> bool:
        """True if all ranks see these tensors of all ranks: the answer is the same on each."""
        return all(self._is_seen[index] for index in indices)

    def list_entries(self, rank: int, indices: Sequence[int]) -> list[Sequence[int]]:
        """(place, bytes) of these tensors on a rank."""
        return [self._table[rank][index] for index in indices]


class _SeenTensors:
    """The tensors that another rank shows: (place, bytes) of each, and `block`, which has the
    copies of those that have no place."""

    def __init__(
        self, table: Sequence[Sequence[int]], block: Bytes, rank: int, memory: GroupMemory
    ) -> None:
        self._table, self._block, self._rank, self._memory = table, block, rank, memory

    def view(self, index: int, start: int, num_bytes: int) -> Bytes:
        """Bytes from `start` on of a tensor. Raises ValueError where it has none there: sizes come
        from another process."""
        place, size = self._table[index]
        if start < 0 or start + num_bytes > size:
            raise ValueError(
                f"rank {self._rank} of the group shows {size} bytes, and {num_bytes} at {start} are"
                " asked for"
            )
        if place <= 0:
            return self._block[start - place : start - place + num_bytes]
        return self._memory.view(self._rank, place + start, num_bytes)

    def forget(self) -> None:
        """Do not keep in this process's map what was read."""
        for place, size in self._table:
            if place > 0:
                self._memory.forget(self._rank, place, size)


class _InPlaceTransfer(Transfer):
    ends_when_all_moved = True

    def __init__(
        self, sources: Sequence[torch.Tensor], dtype: torch.dtype, rank: int, locate: Locate
    ) -> None:
        self._shown = _ShownTensors(sources, locate)
        self._rank, self._num_sources = rank, len(sources)
        self.dtype = dtype
        self.operand_bytes = self._shown.num_bytes

    def stage(self, block: Bytes) -> None:
        self._shown.write(block)

    def _see(self, blocks: Sequence[Bytes], rank: int, memory: GroupMemory) -> _SeenTensors:
        block = blocks[rank]
        table = block[: self._num_sources * _ENTRY_BYTES].view(np.int64).reshape(-1, 2)
        return _SeenTensors(table.tolist(), block, rank, memory)


class GatherInPlace(_InPlaceTransfer):
    """Every row becomes what its rank shows of it."""

    name = "all_gather"

    def __init__(self, gathered: Sequence[GatheredTensor], rank: int, locate: Locate) -> None:
        dtype = gathered[0].source.dtype
        compared = dtype if dtype in DTYPES else torch.uint8
        super().__init__([each.source for each in gathered], compared, rank, locate)
        self._gathered = gathered
        self.agreed_bytes = sum(each.source.nbytes for each in gathered)

    def move(self, blocks: Sequence[Bytes], memory: GroupMemory) -> None:
        _copy_own_rows(self._gathered, self._rank)
        for rank in range(len(blocks)):
            if rank != self._rank:
                _copy_rows(self._gathered, self._see(blocks, rank, memory), rank)


class ReduceScatterInPlace(_InPlaceTransfer):
    """`result` becomes the reduction of this rank's row of `rows` [ranks, ...] of all ranks."""

    name = "reduce_scatter"

    def __init__(
        self, result: torch.Tensor, rows: torch.Tensor, reduce_op: str, rank: int, locate: Locate
    ) -> None:
        super().__init__([rows], rows.dtype, rank, locate)
        self._result, self._row, self.reduce_op = view_bytes(result), rows[rank], reduce_op
        self._rows = rows
        self.agreed_bytes = rows.nbytes

    def move(self, blocks: Sequence[Bytes], memory: GroupMemory) -> None:
        num_bytes = self._row.nbytes
        operands = []
        for rank in range(len(blocks)):
            if rank == self._rank:
                operands.append(view_bytes(self._row))
            else:
                peer_tensors = self._see(blocks, rank, memory)
                operands.append(peer_tensors.view(0, self._rank * num_bytes, num_bytes))
        reduce_into([self._result], operands, self.dtype, self.reduce_op)


class ReduceRowsInPlace(_InPlaceTransfer):
    """`rows`, views of this rank's `whole`, become the reduction of the same elements of all ranks.
    No two ranks have a row in common: each reads its own from all and writes to its own tensor.
    """

    name = "reduce_scatter"

    def __init__(
        self,
        whole: torch.Tensor,
        rows: Sequence[torch.Tensor],
        reduce_op: str,
        rank: int,
        locate: Locate,
    ) -> None:
        super().__init__([whole], whole.dtype, rank, locate)
        self.reduce_op, self.agreed_bytes = reduce_op, whole.nbytes
        # An empty tensor lies nowhere.
        self._rows = [
            (row.data_ptr() - whole.data_ptr(), view_bytes(row)) for row in rows if row.numel()
        ]

    def move(self, blocks: Sequence[Bytes], memory: GroupMemory) -> None:
        peers = {
            rank: self._see(blocks, rank, memory)
            for rank in range(len(blocks))
            if rank != self._rank
        }
        for start, row in self._rows:
            operands = []
            for rank in range(len(blocks)):
                is_own = rank == self._rank
                operands.append(row if is_own else peers[rank].view(0, start, len(row)))
            reduce_into([row], operands, self.dtype, self.reduce_op)


def read_where_they_lie(
    gathered: Sequence[GatheredTensor],
    places: PlacesOfAllRanks,
    indices: Sequence[int],
    own_rank: int,
    memory: GroupMemory,
) -> None:
    """Have every row become what its rank has of it, without waiting for that rank.

    `indices` are those of `gathered` in `places`, which sees all of them.
    """
    _copy_own_rows(gathered, own_rank)
    for rank in range(len(gathered[0].rows)):
        if rank != own_rank:
            table = places.list_entries(rank, indices)
            _copy_rows(gathered, _SeenTensors(table, _NO_BYTES, rank, memory), rank)


def _copy_own_rows(gathered: Sequence[GatheredTensor], own_rank: int) -> None:
    for each in gathered:
        row, start = each.rows[own_rank], each.starts[own_rank]
        source_row = each.source.view(-1)[start : start + row.numel()]
        if row.data_ptr() != source_row.data_ptr():
            row.copy_(source_row.view(row.shape))


def _copy_rows(gathered: Sequence[GatheredTensor], peer_tensors: _SeenTensors, rank: int) -> None:
    num_mapped_bytes, max_mapped_bytes = 0, get_block_sizes().shared_mapped_bytes
    for index, each in enumerate(gathered):
        item = each.source.element_size()
        at = each.starts[rank] * item
        for piece in _split_row(each.rows[rank], max(1, max_mapped_bytes // item)):
            num_bytes = piece.numel() * item
            if num_mapped_bytes + num_bytes > max_mapped_bytes:
                peer_tensors.forget()
                num_mapped_bytes = 0
            _copy_values(piece, peer_tensors.view(index, at, num_bytes), each.source.dtype)
            at += num_bytes
            num_mapped_bytes += num_bytes
    peer_tensors.forget()


def _split_row(row: torch.Tensor, max_elements: int) -> Sequence[torch.Tensor]:
    if row.numel() > max_elements and row.is_contiguous():
        return row.view(-1).split(max_elements)
    return [row] if row.numel() else []


def _copy_values(row: torch.Tensor, values: Bytes, dtype: torch.dtype) -> None:
    """Write `values`, of type `dtype`, to a row of any type and strides."""
    # Not by NumPy: a storage that it has seen can never be resized, as FSDP's are.
    row.copy_(torch.from_numpy(values).view(dtype).view(row.shape))


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
