"""Where each rank of a process group writes how far it is, for the others to read.

A board lies in its rank's arena and is written by that rank alone. Each word has a cache line of
its own and only grows, so that a reader can miss no change. The arena begins with a directory of
its boards, by group, and of its segments.
"""

from __future__ import annotations

import struct
import uuid
from typing import NamedTuple

from phalanx.mesh.shared_memory.arena import MappedArena, OwnArena
from phalanx.mesh.shared_memory.futex import wake_waiters
from phalanx.mesh.shared_memory.segments import TABLE_BYTES as SEGMENT_TABLE_BYTES

NUM_SLOTS = 64
NUM_MESSAGE_SLOTS = 32

# Lines of a board. After them come four of each rank of the group: how many messages this one has
# sent to it, how many of its messages this one has taken, how many it has seen where it waits for
# another one than those, and how often it has written one of the last two.
POSTED, REDUCED, CONSUMED = range(3)
_NUM_LINES = 3
_NUM_LINES_OF_PAIR = 4
_LINE_BYTES = 64
_SLOT_BYTES = 64
_MASK = 2**32 - 1

# The start of an arena: a word that tells whether its rank has left, a number that no other arena
# has, the number of boards, and (key, offset) of each.
_LEFT_AT, _NONCE_AT, _COUNT_AT, _DIRECTORY_AT = 0, 16, _LINE_BYTES, 2 * _LINE_BYTES
_NONCE_BYTES = 16
_MAX_BOARDS = 4096
_ENTRY = struct.Struct("<QQ")
SEGMENT_TABLE_AT = _DIRECTORY_AT + _MAX_BOARDS * _ENTRY.size
_HEADER_BYTES = SEGMENT_TABLE_AT + SEGMENT_TABLE_BYTES

_SLOT = struct.Struct("<QQQIIII")


class Slot(NamedTuple):
    """What a rank says of an operation: the place of its operand (`segments`), and what the ranks
    must agree on.

    `agreed_bytes` is a size that is the same on all ranks. `peer` is a root, or the tag of a
    message.
    """

    place: int
    num_bytes: int
    agreed_bytes: int
    kind: int
    dtype: int
    reduce_op: int
    peer: int

    @property
    def agreed(self) -> tuple[int, ...]:
        return self[2:]


def has_reached(word: int, target: int) -> bool:
    """True if a word that counts up to `target`, and begins anew after 2**32, has come to it."""
    return ((word - target) & _MASK) < 2**31


def is_same_count(word: int, count: int) -> bool:
    """True if a word that counts, and begins anew after 2**32, is at `count`."""
    return word == count & _MASK


def reserve_directory(arena: OwnArena) -> None:
    """Reserve the start of a new arena, whose pages are zeros, and give it its nonce."""
    block = arena.allocate(_HEADER_BYTES)
    assert block.offset == 0
    arena.memory[_NONCE_AT : _NONCE_AT + _NONCE_BYTES] = uuid.uuid4().bytes


def read_nonce(arena: MappedArena) -> str:
    """What tells an arena from all others, of this host and of any other."""
    return arena.memory[_NONCE_AT : _NONCE_AT + _NONCE_BYTES].hex()


def say_left(arena: OwnArena) -> None:
    """Tell those who wait for this rank that it takes no part any more."""
    arena.words[_LEFT_AT // 4] = 1
    wake_waiters(arena.address + _LEFT_AT)


def has_left(arena: MappedArena) -> bool:
    return arena.words[_LEFT_AT // 4] != 0


def directory_word(arena: MappedArena) -> tuple[int, int]:
    """The address and the value of the word that changes when a board is added."""
    return arena.address + _COUNT_AT, arena.words[_COUNT_AT // 4]


class Board:
    """The board of one rank for a group of `num_ranks`."""

    def __init__(self, arena: MappedArena, offset: int, num_ranks: int) -> None:
        self.arena, self._offset, self._num_ranks = arena, offset, num_ranks
        # Raises ValueError for an offset that is not in the arena.
        arena.view(offset, self.count_bytes(num_ranks))
        self._first_word = offset // 4
        self._slots_at = offset + self._count_line_bytes(num_ranks)
        self._message_slots_at = self._slots_at + NUM_SLOTS * _SLOT_BYTES

    @staticmethod
    def count_bytes(num_ranks: int) -> int:
        num_slots = NUM_SLOTS + num_ranks * NUM_MESSAGE_SLOTS
        return Board._count_line_bytes(num_ranks) + num_slots * _SLOT_BYTES

    @staticmethod
    def _count_line_bytes(num_ranks: int) -> int:
        return (_NUM_LINES + _NUM_LINES_OF_PAIR * num_ranks) * _LINE_BYTES

    def read(self, line: int) -> int:
        return self.arena.words[self._first_word + line * (_LINE_BYTES // 4)]

    def address_of(self, line: int) -> int:
        return self.arena.address + self._offset + line * _LINE_BYTES

    def write(self, line: int, value: int) -> None:
        """Set a word of this rank's own board, and wake those who wait for it."""
        self.write_quietly(line, value)
        wake_waiters(self.address_of(line))

    def write_quietly(self, line: int, value: int) -> None:
        """Set a word of this rank's own board that nobody waits for."""
        self.arena.words[self._first_word + line * (_LINE_BYTES // 4)] = value & _MASK

    def read_slot(self, sequence: int) -> Slot:
        return self._read_slot_at(self._slots_at + sequence % NUM_SLOTS * _SLOT_BYTES)

    def write_slot(self, sequence: int, slot: Slot) -> None:
        self._write_slot_at(self._slots_at + sequence % NUM_SLOTS * _SLOT_BYTES, slot)

    def read_message_slot(self, target: int, number: int) -> Slot:
        """Slot `number` of the messages that this board's rank sends to `target`."""
        return self._read_slot_at(self._message_slot_at(target, number))

    def write_message_slot(self, target: int, number: int, slot: Slot) -> None:
        self._write_slot_at(self._message_slot_at(target, number), slot)

    def sent_line(self, target: int) -> int:
        """The line that counts the messages sent to `target`."""
        return _NUM_LINES + target

    def taken_line(self, source: int) -> int:
        """The line that counts the messages of `source` that have been taken."""
        return _NUM_LINES + self._num_ranks + source

    def wanting_line(self, source: int) -> int:
        """The line that counts the messages of `source` that have been seen, where this board's
        rank waits for a later one."""
        return _NUM_LINES + 2 * self._num_ranks + source

    def answered_line(self, source: int) -> int:
        """The line that counts how often `taken_line` or `wanting_line` was written before: a
        sender waits for either."""
        return _NUM_LINES + 3 * self._num_ranks + source

    def _message_slot_at(self, target: int, number: int) -> int:
        index = target * NUM_MESSAGE_SLOTS + number % NUM_MESSAGE_SLOTS
        return self._message_slots_at + index * _SLOT_BYTES

    def _read_slot_at(self, at: int) -> Slot:
        return Slot(*_SLOT.unpack_from(self.arena.memory, at))

    def _write_slot_at(self, at: int, slot: Slot) -> None:
        _SLOT.pack_into(self.arena.memory, at, *slot)


def add_board(arena: OwnArena, key: int, num_ranks: int) -> Board:
    """Make this rank's board for the group `key` and list it in the directory.

    Raises MemoryError if the directory is full.
    """
    number = arena.words[_COUNT_AT // 4]
    if number >= _MAX_BOARDS:
        raise MemoryError(f"this rank has been in {_MAX_BOARDS} process groups")
    block = arena.allocate(Board.count_bytes(num_ranks))
    arena.view_block(block)[:] = 0
    board = Board(arena, block.offset, num_ranks)
    _ENTRY.pack_into(arena.memory, _DIRECTORY_AT + number * _ENTRY.size, key, block.offset)
    arena.words[_COUNT_AT // 4] = number + 1
    wake_waiters(arena.address + _COUNT_AT)
    return board


def find_board(arena: MappedArena, key: int, num_ranks: int) -> Board | None:
    """The board of the arena's rank for the group `key`; None until that rank has made one."""
    number = min(arena.words[_COUNT_AT // 4], _MAX_BOARDS)
    for index in range(number):
        entry_key, offset = _ENTRY.unpack_from(arena.memory, _DIRECTORY_AT + index * _ENTRY.size)
        if entry_key == key:
            return Board(arena, offset, num_ranks)
    return None
