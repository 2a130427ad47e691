"""What the collectives of a group move: one class for each pattern.

A transfer puts this rank's operand where others can read it (`stage`), and once all operands that
it needs are there it moves what is this rank's to move (`move`). Where ranks sum a slice each, or
read each other's tensors where they lie, it ends when all have moved theirs (`collect`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from phalanx.mesh.shared_memory.arena import Bytes
from phalanx.mesh.shared_memory.reduction import reduce_into

# Slices begin at cache lines.
_SLICE_ALIGNMENT = 64


class GroupMemory(Protocol):
    """The memory of all ranks of a group, by places that they have named."""

    def view(self, rank: int, place: int, num_bytes: int) -> Bytes:
        """The bytes at a place of a rank."""
        ...

    def forget(self, rank: int, place: int, num_bytes: int) -> None:
        """What was read there is not needed any more, and counts as this process's no longer."""
        ...


class Transfer:
    """Base of all: a barrier, which moves nothing.

    `operand_bytes`: how much this rank stages. `place`: where its operand lies, if others can read
    it there; then nothing is staged. `agreed_bytes`: a size that all ranks must have
    alike. `root`: the rank of the group that all must name alike.
    """

    name = "barrier"
    ends_when_all_moved = False
    dtype = torch.uint8
    reduce_op = "sum"
    root = 0
    operand_bytes = 0
    agreed_bytes = 0
    place: int | None = None

    def stage(self, block: Bytes) -> None:
        """Write this rank's operand to `block`, of `operand_bytes`."""

    def needs_operand_of(self, rank: int) -> bool:
        """True if `move` reads what `rank` stages, or waits for it to come."""
        return True

    def move(self, blocks: Sequence[Bytes], memory: GroupMemory) -> None:
        """Move what this rank has to, from the operands of all ranks of the group. `memory`:
        what lies at places that an operand names."""

    def collect(self, block: Bytes) -> None:
        """Take what others have written into this rank's operand."""


class AllReduceSlices(Transfer):
    """Each rank reduces a slice and writes the result into the operands of all. In place."""

    name = "all_reduce"
    ends_when_all_moved = True

    def __init__(
        self,
        values: Bytes,
        dtype: torch.dtype,
        reduce_op: str,
        rank: int,
        num_ranks: int,
        place: int | None = None,
    ) -> None:
        self._values, self.dtype, self.reduce_op, self._rank = values, dtype, reduce_op, rank
        self.place = place
        self.operand_bytes = self.agreed_bytes = len(values)
        length = -(-len(values) // num_ranks)
        length = -(-length // _SLICE_ALIGNMENT) * _SLICE_ALIGNMENT
        self._start = min(len(values), rank * length)
        self._stop = min(len(values), self._start + length)

    def stage(self, block: Bytes) -> None:
        # Its own slice a rank reads where it is.
        np.copyto(block[: self._start], self._values[: self._start])
        np.copyto(block[self._stop :], self._values[self._stop :])

    def move(self, blocks: Sequence[Bytes], memory: GroupMemory) -> None:
        operands = [block[self._start : self._stop] for block in blocks]
        operands[self._rank] = self._values[self._start : self._stop]
        # Into this rank's tensor first, which nobody else reads.
        targets = [operands[self._rank], *operands[: self._rank], *operands[self._rank + 1 :]]
        reduce_into(targets, operands, self.dtype, self.reduce_op)

    def collect(self, block: Bytes) -> None:
        np.copyto(self._values[: self._start], block[: self._start])
        np.copyto(self._values[self._stop :], block[self._stop :])


class AllReduceWhole(Transfer):
    """Each rank reduces everything: of few bytes that is quicker than waiting twice. In place."""

    name = "all_reduce"

    def __init__(self, values: Bytes, dtype: torch.dtype, reduce_op: str, rank: int) -> None:
        self._values, self.dtype, self.reduce_op, self._rank = values, dtype, reduce_op, rank
        self.operand_bytes = self.agreed_bytes = len(values)

    def stage(self, block: Bytes) -> None:
        np.copyto(block, self._values)

    def move(self, blocks: Sequence[Bytes], memory: GroupMemory) -> None:
        reduce_into([self._values], blocks, self.dtype, self.reduce_op)


class ReduceToRoot(AllReduceWhole):
    """The root's tensor becomes the reduction of all."""

    name = "reduce"

    def __init__(
        self, values: Bytes, dtype: torch.dtype, reduce_op: str, rank: int, root: int
    ) -> None:
        super().__init__(values, dtype, reduce_op, rank)
        self.root = root

    def needs_operand_of(self, rank: int) -> bool:
        return self._rank == self.root

    def move(self, blocks: Sequence[Bytes], memory: GroupMemory) -> None:
        if self._rank == self.root:
            super().move(blocks, memory)


class AllGather(Transfer):
    """`rows[r]` becomes what rank r has."""

    name = "all_gather"

    def __init__(self, rows: Sequence[Bytes], values: Bytes, dtype: torch.dtype, rank: int) -> None:
        self._rows, self._values, self.dtype, self._rank = rows, values, dtype, rank
        self.operand_bytes = self.agreed_bytes = len(values)

    def stage(self, block: Bytes) -> None:
        np.copyto(block, self._values)

    def move(self, blocks: Sequence[Bytes], memory: GroupMemory) -> None:
        for rank, (row, block) in enumerate(zip(self._rows, blocks, strict=True)):
            if rank != self._rank:
                np.copyto(row, block)
            elif row.ctypes.data != self._values.ctypes.data:
                np.copyto(row, self._values)


class ReduceScatter(Transfer):
    """`result` becomes the reduction of this rank's row of all ranks."""

    name = "reduce_scatter"

    def __init__(
        self, result: Bytes, rows: Sequence[Bytes], dtype: torch.dtype, reduce_op: str, rank: int
    ) -> None:
        self._result, self._rows, self._rank = result, rows, rank
        self.dtype, self.reduce_op = dtype, reduce_op
        self._row_bytes = len(result)
        self.operand_bytes = self.agreed_bytes = self._row_bytes * len(rows)

    def stage(self, block: Bytes) -> None:
        for rank, row in enumerate(self._rows):
            if rank != self._rank:
                np.copyto(self._find_row(block, rank), row)

    def move(self, blocks: Sequence[Bytes], memory: GroupMemory) -> None:
        operands = [self._find_row(block, self._rank) for block in blocks]
        operands[self._rank] = self._rows[self._rank]
        reduce_into([self._result], operands, self.dtype, self.reduce_op)

    def _find_row(self, block: Bytes, rank: int) -> Bytes:
        return block[rank * self._row_bytes : (rank + 1) * self._row_bytes]


class Broadcast(Transfer):
    """`values` become what the root has."""

    name = "broadcast"

    def __init__(self, values: Bytes, dtype: torch.dtype, rank: int, root: int) -> None:
        self._values, self.dtype, self._rank, self.root = values, dtype, rank, root
        self.agreed_bytes = len(values)
        if rank == root:
            self.operand_bytes = len(values)

    def stage(self, block: Bytes) -> None:
        if self._rank == self.root:
            np.copyto(block, self._values)

    def needs_operand_of(self, rank: int) -> bool:
        return rank == self.root and self._rank != self.root

    def move(self, blocks: Sequence[Bytes], memory: GroupMemory) -> None:
        if self._rank != self.root:
            np.copyto(self._values, blocks[self.root])


class AllToAll(Transfer):
    """`received[r]` becomes what rank r has for this one; `parts[r]` is for rank r.

    Parts may be of any size. Before them a rank stages how long each is.
    """

    name = "all_to_all"

    def __init__(
        self, received: Sequence[Bytes], parts: Sequence[Bytes], dtype: torch.dtype, rank: int
    ) -> None:
        self._received, self._parts, self.dtype, self._rank = received, parts, dtype, rank
        self._num_header_bytes = 8 * len(parts)
        self.operand_bytes = self._num_header_bytes + sum(len(part) for part in parts)

    def stage(self, block: Bytes) -> None:
        sizes = np.array([len(part) for part in self._parts], np.int64)
        np.copyto(block[: self._num_header_bytes], sizes.view(np.uint8))
        start = self._num_header_bytes
        for part in self._parts:
            np.copyto(block[start : start + len(part)], part)
            start += len(part)

    def move(self, blocks: Sequence[Bytes], memory: GroupMemory) -> None:
        for rank, (received, block) in enumerate(zip(self._received, blocks, strict=True)):
            sizes = block[: self._num_header_bytes].view(np.int64)
            start = self._num_header_bytes + int(sizes[: self._rank].sum())
            if int(sizes[self._rank]) != len(received):
                raise ValueError(
                    f"rank {rank} of the group sends {int(sizes[self._rank])} bytes and"
                    f" {len(received)} are expected"
                )
            np.copyto(received, block[start : start + len(received)])
