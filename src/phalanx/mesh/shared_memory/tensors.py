"""Tensors that lie in this rank's arena, where other ranks read them."""

from __future__ import annotations

import weakref

import torch

from phalanx.mesh.shared_memory.arena import OwnArena


class ArenaTensors:
    """Makes tensors in an arena, and tells where they lie."""

    def __init__(self, arena: OwnArena) -> None:
        self._arena = arena

    def make(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor whose numbers are anything. Raises MemoryError if the arena is full."""
        block = self._arena.allocate(max(1, num_elements * dtype.itemsize))
        values = self._arena.view_block(block)
        # The storage of the tensor refers to them. At exit all of it goes anyway.
        weakref.finalize(values, self._arena.discard, block).atexit = False
        return torch.from_numpy(values)[: num_elements * dtype.itemsize].view(dtype)

    def locate(self, tensor: torch.Tensor) -> int | None:
        """The place of the first byte of a contiguous tensor; None if it lies elsewhere."""
        place = tensor.data_ptr() - self._arena.address
        if 0 <= place < self._arena.num_bytes:
            return place
        return None
