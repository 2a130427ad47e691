"""Tensors that live in shared memory themselves, so that other ranks read and write them in place.

torch moves the storage of a tensor, with all its views, into a file of /dev/shm that has no name
(what `Tensor.share_memory_` does). This rank lists its descriptor in its arena, and others map it
when an operation first names it. The file is gone with the last process that maps it.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from dataclasses import dataclass

import torch

from phalanx.mesh.shared_memory.arena import Bytes, MappedArena, OwnArena, open_arena_of_process

# A place is the number of a segment above so many bits of an offset in it; segment 0 is the arena.
# The number is a line of the table, and above it how often that line was used before: whoever has
# the segment of before mapped does not take it for the new one.
_OFFSET_BITS = 44
_MAX_SEGMENTS = 1024
# Places are signed numbers of 64 bits where ranks exchange them.
_MAX_USES_OF_LINE = 512
_SHARED_FILES = "/dev/shm"
# Of /dev/shm's free bytes: what else comes there meanwhile must find room.
_MAX_SHARE_OF_FREE = 0.5

# (descriptor, how often the line was used with this time and 0 while it is not, inode, bytes). The
# first line says that a tensor found no room: (index of _REASONS, 1, bytes needed, bytes free).
_ENTRY = struct.Struct("<IIQQ")
TABLE_BYTES = _MAX_SEGMENTS * _ENTRY.size


_IS_FULL, _LINES_ARE_USED, _IS_REFUSED = range(3)
_REASONS = (
    "",
    f"{_MAX_SEGMENTS - 1:,} tensors of a rank lie there, and no more can be listed",
    "the system refuses it",
)


@dataclass
class _Segment:
    number: int
    descriptor: int
    inode: int


@dataclass(frozen=True)
class NoRoom:
    """A tensor did not come into shared memory: bytes that the ranks of this host needed for it,
    and those that are free there. `why`: what the system said; empty where it was not asked."""

    needed_bytes: int
    free_bytes: int
    why: str = ""


class OwnSegments:
    """The tensors of this rank that others see. `table_at`: where in its arena they are listed.

    `no_room`: the first time that one found no room; None where each did.
    """

    def __init__(self, arena: OwnArena, table_at: int, num_local_ranks: int) -> None:
        self._arena, self._table_at, self._num_local_ranks = arena, table_at, num_local_ranks
        self._by_inode: dict[int, _Segment] = {}
        self._num_lines_used = 0
        # Numbers that the lines of withdrawn segments have next, the oldest first.
        self._free_numbers: deque[int] = deque()
        self.no_room: NoRoom | None = None

    def publish(self, tensor: torch.Tensor) -> bool:
        """Move the storage of `tensor` into shared memory, unless it is there; all its views
        follow. False, and nothing is done, where there is no room."""
        storage = tensor.untyped_storage()
        if self._find(storage) is not None:
            return True
        # The other ranks of this host ask for as much at the same time.
        needed_bytes = storage.nbytes() * self._num_local_ranks
        free_bytes = _count_free_bytes()
        if not storage.is_shared() and needed_bytes > free_bytes * _MAX_SHARE_OF_FREE:
            return self._say_no_room(_IS_FULL, NoRoom(needed_bytes, free_bytes))
        if self._num_lines_used + 1 >= _MAX_SEGMENTS and not self._free_numbers:
            why = _REASONS[_LINES_ARE_USED]
            return self._say_no_room(_LINES_ARE_USED, NoRoom(needed_bytes, free_bytes, why))
        try:
            descriptor, num_bytes = storage._share_fd_cpu_()
        except (RuntimeError, OSError) as error:
            # No descriptors are left, or /dev/shm is full or read-only.
            return self._say_no_room(_IS_REFUSED, NoRoom(needed_bytes, free_bytes, str(error)))
        segment = _Segment(self._take_number(), descriptor, os.fstat(descriptor).st_ino)
        self._by_inode[segment.inode] = segment
        self._write(segment, num_bytes, is_in_use=True)
        return True

    def _take_number(self) -> int:
        if self._num_lines_used + 1 >= _MAX_SEGMENTS:
            return self._free_numbers.popleft()
        self._num_lines_used += 1
        return self._num_lines_used

    def _say_no_room(self, reason: int, no_room: NoRoom) -> bool:
        """Keep the first, where the other ranks see it; False, for `publish`."""
        if self.no_room is None:
            self.no_room = no_room
            numbers = (reason, 1, no_room.needed_bytes, no_room.free_bytes)
            _ENTRY.pack_into(self._arena.memory, self._table_at, *numbers)
        return False

    def withdraw(self, tensor: torch.Tensor) -> None:
        """Say that nobody may use the storage of `tensor` any more; others let go of it."""
        segment = self._find(tensor.untyped_storage())
        if segment is not None:
            del self._by_inode[segment.inode]
            self._write(segment, 0, is_in_use=False)
            if _count_uses(segment.number) < _MAX_USES_OF_LINE:
                self._free_numbers.append(segment.number + _MAX_SEGMENTS)

    def locate(self, tensor: torch.Tensor) -> int | None:
        """The place of a tensor's first byte; None if it is in no segment."""
        storage = tensor.untyped_storage()
        segment = self._find(storage)
        if segment is None:
            return None
        return segment.number << _OFFSET_BITS | tensor.storage_offset() * tensor.element_size()

    def _find(self, storage: torch.UntypedStorage) -> _Segment | None:
        if not self._by_inode or not storage.is_shared():
            return None
        descriptor, _ = storage._share_fd_cpu_()
        return self._by_inode.get(os.fstat(descriptor).st_ino)

    def _write(self, segment: _Segment, num_bytes: int, *, is_in_use: bool) -> None:
        at = self._table_at + segment.number % _MAX_SEGMENTS * _ENTRY.size
        num_uses = _count_uses(segment.number) if is_in_use else 0
        _ENTRY.pack_into(
            self._arena.memory, at, segment.descriptor, num_uses, segment.inode, num_bytes
        )


class SeenSegments:
    """The segments of another rank, mapped when they are first named."""

    def __init__(self, pid: int, arena: MappedArena, table_at: int) -> None:
        self._pid, self._arena, self._table_at = pid, arena, table_at
        self._mapped: dict[int, MappedArena] = {}

    @property
    def no_room(self) -> NoRoom | None:
        """The first time that a tensor of the other rank found no room; None where each did."""
        reason, is_said, needed_bytes, free_bytes = self._read(0)
        if not is_said or reason >= len(_REASONS):
            return None
        return NoRoom(needed_bytes, free_bytes, _REASONS[reason])

    def view(self, place: int, num_bytes: int) -> Bytes:
        """The bytes at a place that the other rank has named. Raises ValueError if it
        names what cannot be there, and OSError where it is not there any more, or cannot be mapped.
        """
        number, offset = place >> _OFFSET_BITS, place & ((1 << _OFFSET_BITS) - 1)
        if number == 0:
            return self._arena.view(offset, num_bytes)
        if number not in self._mapped:
            # Those that are not in use any more go when a new one comes.
            for old in [each for each in self._mapped if not self._is_in_use(each)]:
                del self._mapped[old]
            self._mapped[number] = self._map(number)
        return self._mapped[number].view(offset, num_bytes)

    def _read(self, number: int) -> tuple[int, ...]:
        line = number % _MAX_SEGMENTS
        return _ENTRY.unpack_from(self._arena.memory, self._table_at + line * _ENTRY.size)

    def _is_in_use(self, number: int) -> bool:
        return self._read(number)[1] == _count_uses(number)

    def _map(self, number: int) -> MappedArena:
        if number % _MAX_SEGMENTS == 0 or _count_uses(number) > _MAX_USES_OF_LINE:
            raise ValueError(f"there is no shared segment {number}")
        descriptor, _, inode, num_bytes = self._read(number)
        if not self._is_in_use(number):
            raise OSError(f"shared segment {number} is not in use")
        return open_arena_of_process(self._pid, descriptor, num_bytes, inode)


def _count_uses(number: int) -> int:
    """How often the line of segment `number` was used, with this time."""
    return number // _MAX_SEGMENTS + 1


def _count_free_bytes() -> int:
    try:
        space = os.statvfs(_SHARED_FILES)
    except OSError:
        return 0
    return space.f_bavail * space.f_frsize
