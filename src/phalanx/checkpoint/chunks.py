"""Checksums of a file by chunks, so that any range of it can be verified.

Torch-free, and light: reports import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from phalanx.core.files import open_regular_file

# Checksums are per chunk, not per tensor or file: a rank that needs a slice reads and verifies only
# the chunks it lies in, and a flipped bit is named by tensor all the same, by the file's header.
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class FileSizeAndChecksums:
    """A file as the manifest lists it: its size, and the checksums of its chunks as one string of
    hex."""

    num_bytes: int
    chunks_xxh3: str

    def checksum_of_chunk(self, number: int) -> str:
        # 64 bits are 16 digits of hex.
        return self.chunks_xxh3[16 * number : 16 * number + 16]

    @property
    def num_chunks(self) -> int:
        return -(-self.num_bytes // CHUNK_BYTES)

    @classmethod
    def compute_from_file(cls, path: Path) -> FileSizeAndChecksums:
        """The size and checksums of an existing file as it is now. Raises OSError."""
        digests = ChunkChecksumStream()
        with open_regular_file(path) as file:
            while data := file.read(CHUNK_BYTES):
                digests.add_bytes(data)
        return digests.finish()


class ChunkChecksumStream:
    """XXH3-64 of each chunk of a stream."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self._in_chunk, self._num_bytes = 0, 0
        self._done: list[str] = []

    def add_bytes(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self._num_bytes += len(view)
        while len(view):
            piece = view[: CHUNK_BYTES - self._in_chunk]
            self._hash.update(piece)
            self._in_chunk += len(piece)
            view = view[len(piece) :]
            if self._in_chunk == CHUNK_BYTES:
                self._append_chunk_checksum()

    def _append_chunk_checksum(self) -> None:
        self._done.append(self._hash.hexdigest())
        self._hash.reset()
        self._in_chunk = 0

    def finish(self) -> FileSizeAndChecksums:
        """The size and checksums of the stream, which has ended."""
        if self._in_chunk:
            self._append_chunk_checksum()
        return FileSizeAndChecksums(self._num_bytes, "".join(self._done))
