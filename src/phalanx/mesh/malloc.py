"""Have glibc give large freed blocks back: a sharded rank on a CPU would otherwise peak as high as one that is not.

glibc takes blocks of up to 32 MiB from its heap once blocks of that size were freed. Gathered weights and gradients
then leave holes between the tensors that stay, and what was freed is neither reused nor returned.
"""

from __future__ import annotations

import ctypes
import os
import sys

M_MMAP_THRESHOLD = -3  # malloc.h
# Smaller ones return more, and cost more page faults where activations are many: docs/benchmarks.md.
LARGE_BLOCK_BYTES = 4 * 2**20
CHOSEN_BY_USER = ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def return_large_blocks() -> None:
    """For the rest of this process. Nothing where the environment says otherwise, or there is no glibc."""
    if sys.platform != "linux" or any(name in os.environ for name in CHOSEN_BY_USER):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
