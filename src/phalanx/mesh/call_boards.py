"""Where ranks of one machine leave the digests of their calls for each other: memory of a file that
each maps, read and written without a system call."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from pathlib import Path

from phalanx.core.black_box import read_boot_id
from phalanx.core.files import create_regular_file, open_regular_file

# Channels share places by chance; a place says whose it is.
_NUM_CHANNELS = 256
_NUM_PLACES = 64
_WORDS_PER_PLACE = 4
_NUM_WORDS = _NUM_CHANNELS * _NUM_PLACES * _WORDS_PER_PLACE
_CHANNEL, _DIGEST, _SEQUENCE = range(3)


class CallBoard:
    """The digests of one rank's calls, by channel and number; of the last 64 of a channel."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("Q")

    @classmethod
    def create(cls, path: Path) -> CallBoard:
        """A new board of this rank; OSError where the disk refuses it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # A new file: another process may still have an earlier one mapped.
        path.unlink(missing_ok=True)
        # Zeros that are written: a page without room on the disk would kill the process (SIGBUS).
        with create_regular_file(path) as file:
            file.write(bytes(8 * _NUM_WORDS))
        file_descriptor = os.open(path, os.O_RDWR)
        try:
            return cls(mmap.mmap(file_descriptor, 8 * _NUM_WORDS))
        finally:
            os.close(file_descriptor)

    @classmethod
    def open(cls, path: Path) -> CallBoard:
        """The board of another rank, to be read; OSError if it is not there."""
        with open_regular_file(path) as file:
            return cls(mmap.mmap(file.fileno(), 8 * _NUM_WORDS, prot=mmap.PROT_READ))

    def write(self, channel: int, sequence: int, digest: int) -> None:
        at = _find_place(channel, sequence)
        words = self._words
        # The number last: whoever sees it sees the rest.
        words[at + _CHANNEL] = channel
        words[at + _DIGEST] = digest
        words[at + _SEQUENCE] = sequence

    def read(self, channel: int, sequence: int) -> int | None:
        """The digest of call `sequence`; None where it has not come, or is forgotten."""
        at = _find_place(channel, sequence)
        words = self._words
        if words[at + _SEQUENCE] != sequence:
            return None
        digest = words[at + _DIGEST]
        # Read again: it may have been replaced meanwhile.
        if words[at + _CHANNEL] != channel or words[at + _SEQUENCE] != sequence:
            return None
        return digest

    def close(self) -> None:
        self._words.release()
        with contextlib.suppress(BufferError):
            self._memory.close()


def hash_channel(key: str) -> int:
    """The number of a channel on boards."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def describe_board(path: Path) -> str:
    """The text by which other ranks of this machine open a board: `open_described_board`."""
    return f"{read_boot_id()} {path.absolute()}"


def open_described_board(description: str) -> CallBoard | None:
    """Open the board that `describe_board` described; None where it is on another machine."""
    boot_id, _, path = description.partition(" ")
    if not boot_id or boot_id != read_boot_id():
        return None
    try:
        return CallBoard.open(Path(path))
    except OSError:
        # A container of its own, say.
        return None


def _find_place(channel: int, sequence: int) -> int:
    number = (channel % _NUM_CHANNELS) * _NUM_PLACES + sequence % _NUM_PLACES
    return number * _WORDS_PER_PLACE
