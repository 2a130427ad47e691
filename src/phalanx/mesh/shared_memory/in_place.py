"""Gathers and reduce-scatters of tensors that other ranks read where they lie.

A rank says where its tensors are, by a table in its arena; what lies elsewhere than in memory that
others see it copies behind the table. Nobody may change what it has said before all have read it:
such an operation ends on every rank when all of them have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from phalanx.mesh.shared_memory.arena import Bytes
from phalanx.mesh.shared_memory.reduction import DTYPES, reduce_into
from phalanx.mesh.shared_memory.tensors import view_bytes
from phalanx.mesh.shared_memory.transfers import GroupMemory, Transfer

# Tells where a tensor lies that other ranks see, and None of others.
Locate = Callable[[torch.Tensor], int | None]

_ENTRY_BYTES = 16
_ALIGNMENT = 64


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


class _SeenTensors:
    """The tensors that another rank shows, by its operand."""

    def __init__(self, block: Bytes, num_tensors: int, rank: int, memory: GroupMemory) -> None:
        self._block, self._rank, self._memory = block, rank, memory
        table = block[: num_tensors * _ENTRY_BYTES].view(np.int64).reshape(num_tensors, 2)
        self._table = table.tolist()

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
        places = [(place, size) for place, size in self._table if place > 0]
        if places:
            first = min(place for place, _ in places)
            last = max(place + size for place, size in places)
            self._memory.forget(self._rank, first, last - first)


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
        return _SeenTensors(blocks[rank], self._num_sources, rank, memory)


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
        for rank in range(len(blocks)):
            if rank == self._rank:
                self._copy_own_rows()
                continue
            seen = self._see(blocks, rank, memory)
            for index, each in enumerate(self._gathered):
                source, row = each.source, each.rows[rank]
                if row.numel():
                    item = source.element_size()
                    values = seen.view(index, each.starts[rank] * item, row.numel() * item)
                    _copy_values(row, values, source.dtype)
            seen.forget()

    def _copy_own_rows(self) -> None:
        for each in self._gathered:
            row, start = each.rows[self._rank], each.starts[self._rank]
            own = each.source.view(-1)[start : start + row.numel()]
            if row.data_ptr() != own.data_ptr():
                row.copy_(own.view(row.shape))


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
                seen = self._see(blocks, rank, memory)
                operands.append(seen.view(0, self._rank * num_bytes, num_bytes))
        reduce_into([self._result], operands, self.dtype, self.reduce_op)


def _copy_values(row: torch.Tensor, values: Bytes, dtype: torch.dtype) -> None:
    """Write `values`, of type `dtype`, to a row of any type and strides."""
    # Not by NumPy: a storage that it has seen can never be resized, as FSDP's are.
    row.copy_(torch.from_numpy(values).view(dtype).view(row.shape))


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
