"""The memory that one rank shares with the others of its host.

It is a memfd: a file without a name, which no file system holds and no size of /dev/shm limits. It
is gone when the last process that maps it is, however that ends. Others open it through /proc, as
the kernel lets processes of one user do. It is large and sparse: a page takes memory once it has
been touched.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from phalanx.core.forked_copy import ForkedCopyGuard
from phalanx.mesh.shared_memory.file_map import FileMap

Bytes = npt.NDArray[np.uint8]

ARENA_BYTES = 64 << 30
_ALIGNMENT = 64
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class ArenaBlock:
    """`num_bytes` at `offset` of an arena; `capacity` were reserved."""

    offset: int
    num_bytes: int
    capacity: int


class MappedArena:
    """The arena of one rank, mapped into this process."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._map = FileMap(descriptor, num_bytes)
        # It is no part of a core dump: that would be as long as the whole file.
        self._map.madvise(mmap.MADV_DONTDUMP)
        self.num_bytes = num_bytes
        self.memory = memoryview(self._map.values).cast("B")
        self.bytes: Bytes = np.frombuffer(self.memory, np.uint8)
        self.words = self.memory.cast("I")
        self.address = int(self.bytes.ctypes.data)

    def view(self, offset: int, num_bytes: int) -> Bytes:
        """The bytes at `offset`. Raises ValueError if they are not all in the arena: offsets come
        from other processes."""
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.num_bytes:
            raise ValueError(f"{num_bytes} bytes at {offset} are outside of a shared arena")
        return self.bytes[offset : offset + num_bytes]

    def forget(self, offset: int, num_bytes: int) -> None:
        """Take pages out of this process's map: they count as its own no more, and come back when
        they are read again."""
        first = offset // _PAGE_BYTES * _PAGE_BYTES
        last = min(-(-(offset + num_bytes) // _PAGE_BYTES) * _PAGE_BYTES, self.num_bytes)
        self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


class OwnArena(MappedArena):
    """The arena of this rank, and what of it is in use.

    A process forked off the rank has the same pages, and its own copy of what is known of them: it
    may give none away and none back.
    """

    def __init__(self, num_bytes: int = ARENA_BYTES) -> None:
        self.descriptor = os.memfd_create("phalanx", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, num_bytes)
            super().__init__(self.descriptor, num_bytes)
        except OSError:
            os.close(self.descriptor)
            raise
        self._guard = ForkedCopyGuard()
        # A garbage collection while it is held may free a tensor that lies here.
        self._lock = threading.RLock()
        self._next_offset, self._is_closed = 0, False
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def allocate(self, num_bytes: int) -> ArenaBlock:
        """Reserve `num_bytes`; what lies there is undefined. Raises MemoryError if the arena is
        full.

        Blocks that were freed last are used first: their pages exist, and may be in a cache.
        """
        if self._guard.is_copy:
            self._guard.end_copy()
        capacity = _round_up_capacity(num_bytes)
        with self._lock:
            free = self._free[capacity]
            if free:
                return ArenaBlock(free.pop(), num_bytes, capacity)
            offset = self._next_offset
            if offset + capacity > self.num_bytes:
                raise MemoryError(f"no {num_bytes} bytes are left in the shared arena")
            self._next_offset = offset + capacity
        return ArenaBlock(offset, num_bytes, capacity)

    def free(self, block: ArenaBlock) -> None:
        """Let others have the block."""
        # A thread of the rank may have held the lock at the fork: nobody would ever release it.
        if self._guard.is_copy:
            return
        with self._lock:
            self._free[block.capacity].append(block.offset)

    def discard(self, block: ArenaBlock) -> None:
        """Free a block, and give its pages back to the system."""
        if self._is_closed or self._guard.is_copy:
            return
        first = -(-block.offset // _PAGE_BYTES) * _PAGE_BYTES
        num_bytes = (block.offset + block.capacity) // _PAGE_BYTES * _PAGE_BYTES - first
        if num_bytes > 0:
            self._map.madvise(mmap.MADV_REMOVE, first, num_bytes)
        self.free(block)

    def view_block(self, block: ArenaBlock) -> Bytes:
        return self.bytes[block.offset : block.offset + block.num_bytes]

    @property
    def reserved_bytes(self) -> int:
        """Bytes that were in use at once so far, with what rounding adds."""
        return self._next_offset

    def close(self) -> None:
        """Close the file; the memory is freed when nobody maps it any more."""
        self._is_closed = True
        os.close(self.descriptor)


def open_arena_of_process(
    pid: int, descriptor: int, num_bytes: int, inode: int | None = None
) -> MappedArena:
    """Map the arena that process `pid` has open as `descriptor`.

    Raises OSError if this process may not, if it is smaller than `num_bytes`, or another file than
    `inode`: the process may have closed that one meanwhile.
    """
    path = Path(f"/proc/{pid}/fd/{descriptor}")
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(opened)
        if inode is not None and status.st_ino != inode:
            raise OSError(f"{path} is another file than the one that was shown")
        if status.st_size < num_bytes:
            raise OSError(f"{path} has {status.st_size} bytes and not {num_bytes}")
        return MappedArena(opened, num_bytes)
    finally:
        # The mapping stays.
        os.close(opened)


def _round_up_capacity(num_bytes: int) -> int:
    """A size of few: at most a quarter more, so that freed blocks find another use."""
    if num_bytes <= _ALIGNMENT:
        return _ALIGNMENT
    step = max(_ALIGNMENT, 1 << max(0, num_bytes.bit_length() - 3))
    return -(-num_bytes // step) * step
