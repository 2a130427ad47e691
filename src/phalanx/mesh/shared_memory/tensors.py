"""Tensors that lie in this rank's arena, where other ranks read them."""

from __future__ import annotations

import weakref

import torch

from phalanx.mesh.shared_memory.arena import Bytes, OwnArena

# Of a larger one the pages are given back, although they are filled again in each step: the largest
# unit of a model is that of its embedding, and its message would lie beside all the rest.
_MAX_KEPT_BYTES = 32 << 20


class ArenaTensors:
    """Makes tensors in an arena, and tells where they lie."""

    def __init__(self, arena: OwnArena) -> None:
        self._arena = arena

    def make(
        self, num_elements: int, dtype: torch.dtype, *, is_reused: bool = False
    ) -> torch.Tensor:
        """A flat tensor whose numbers are anything. Its memory goes back to the system with it, or
        stays for the next of its size where it `is_reused` and not large. Raises MemoryError if the
        arena is full."""
        block = self._arena.allocate(max(1, num_elements * dtype.itemsize))
        values = self._arena.view_block(block)
        # The storage of the tensor refers to them. At exit all of it goes anyway.
        is_kept = is_reused and block.num_bytes <= _MAX_KEPT_BYTES
        give_back = self._arena.free if is_kept else self._arena.discard
        weakref.finalize(values, give_back, block).atexit = False
        return torch.from_numpy(values)[: num_elements * dtype.itemsize].view(dtype)

    def locate(self, tensor: torch.Tensor) -> int | None:
        """The place of the first byte of a contiguous tensor; None if it lies elsewhere."""
        place = tensor.data_ptr() - self._arena.address
        if 0 <= place < self._arena.num_bytes:
            return place
        return None


def view_bytes(tensor: torch.Tensor) -> Bytes:
    """The bytes of a contiguous tensor. Without the version counter, which counts what autograd
    must know of."""
    view: Bytes = tensor.data.view(-1).view(torch.uint8).numpy()
    return view
