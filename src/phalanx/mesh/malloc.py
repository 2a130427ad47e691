"""Have glibc give large freed blocks back: a sharded rank on a CPU would otherwise peak as high as
one that is not.

glibc takes blocks of up to 32 MiB from its heap once blocks of that size were freed. Gathered
weights and gradients then leave holes between the tensors that stay, and what was freed is neither
reused nor returned. Logits of a chunk do the same in every rank: they have pages of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys

import torch

from phalanx.core.block_sizes import get_block_sizes
from phalanx.plan.host_allocator import SHARDED_MAX_HEAP_BLOCK_BYTES

MALLOPT_MMAP_THRESHOLD = -3  # malloc.h
VARIABLES_THAT_SET_MALLOC = ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def make_malloc_return_freed_memory(heap_bytes: int = SHARDED_MAX_HEAP_BLOCK_BYTES) -> None:
    """Have malloc return freed blocks larger than `heap_bytes` to the system, for the rest of this
    process.

    Does nothing if the environment sets its threshold, or without glibc.
    """
    if sys.platform != "linux" or any(name in os.environ for name in VARIABLES_THAT_SET_MALLOC):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # A threshold that is set also stays: glibc no longer raises it by itself (mallopt(3)).
        mallopt(MALLOPT_MMAP_THRESHOLD, heap_bytes)


def make_uninitialized_like(
    shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor
) -> torch.Tensor:
    """A tensor where `like` is, whose numbers are anything.

    On a CPU a large one has pages of its own, huge where the system has such: they are quick to
    get, and go back to the system with the tensor.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    # A tensor of another type than torch's own stands for something else than its bytes.
    is_plain = like.device.type == "cpu" and type(like) in (torch.Tensor, torch.nn.Parameter)
    if (
        sys.platform != "linux"
        or not is_plain
        or num_bytes < get_block_sizes().mapped_scratch_bytes
    ):
        return torch.empty(shape, dtype=dtype, device=like.device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without huge pages refuses.
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
