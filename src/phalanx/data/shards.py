"""One file of tokens with its documents' boundaries and checksums: whole or absent, memory-mapped.
Torch-free.

Byte layout, all numbers little-endian:

    0      magic "PHXSHARD" | version uint32 | length of the JSON uint32
           XXH3-64 of the JSON uint64 | JSON
    4096   tokens   uint16 or uint32 [num_tokens], then zeros up to a multiple of 8 bytes
           ends     uint64 [num_documents]: where each document ends, in tokens; last: num_tokens
           keys     uint64 [num_documents]: who each document is, whatever shard it is in
           sums     uint64: XXH3-64 of every 64 KiB of what lies between byte 4096 and here

The JSON holds the counts and the checksum of `sums`, so that its own checksum stands for the whole
file.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.core.digest import encode_canonical_json
from phalanx.core.errors import DataError
from phalanx.core.files import open_regular_file
from phalanx.data.unreadable import build_unreadable_data_error

MAGIC, VERSION = b"PHXSHARD", 1
PAYLOAD_OFFSET = 4096  # the header has a page to itself
CHUNK_BYTES = 2**16  # what a flipped bit is told by, at 8 bytes of checksum for each
TOKEN_DTYPES = ("<u2", "<u4")

_SHARD_HEADER = struct.Struct("<8sIIQ")
WORD_BYTES = 8
_READ_BYTES = 64 * CHUNK_BYTES

Progress = Callable[[int], None]  # bytes just read


@dataclass(frozen=True)
class ShardFacts:
    """The facts that a dataset records of a shard. `xxh3` is the checksum of its header, and so of
    everything in it.
    """

    file: str
    num_tokens: int
    num_documents: int
    max_token_id: int
    num_bytes: int
    xxh3: str
    continues: bool = False  # its first document began in the shard before


@dataclass(frozen=True)
class Shard:
    """An open shard. The arrays are memory-mapped and read-only."""

    path: Path
    facts: ShardFacts
    vocab_size: int
    dtype: str
    tokenizer_digest: str
    tokens: NDArray[np.integer]  # [num_tokens]
    ends: NDArray[np.uint64]  # [num_documents]
    keys: NDArray[np.uint64]  # [num_documents]
    payload: memoryview  # what `sums` are of
    sums: NDArray[np.uint64]  # [ceil(payload bytes / CHUNK_BYTES)]

    def list_chunks_of_tokens(self, start: int, stop: int) -> range:
        """The numbers of the chunks that tokens `start` to `stop` lie in."""
        itemsize = self.tokens.itemsize
        return range(start * itemsize // CHUNK_BYTES, (stop * itemsize - 1) // CHUNK_BYTES + 1)

    def require_sound_chunk(self, chunk: int) -> None:
        """Raise DataError, with the file and the place, if a chunk is not what was written.

        Reads 64 KiB.
        """
        at = chunk * CHUNK_BYTES
        content = self.payload[at : at + CHUNK_BYTES]
        if xxhash.xxh3_64_intdigest(content) != self.sums[chunk]:
            sections = _ShardSectionOffsets.compute_from_counts(
                self.facts.num_tokens, self.facts.num_documents, self.dtype
            )
            start = PAYLOAD_OFFSET + at
            raise _describe_damage_in_range(self, sections, start, start + len(content))


def choose_smallest_token_dtype(vocab_size: int) -> str:
    """The smallest type that holds every id of a vocabulary."""
    if vocab_size <= 2**16:
        return "<u2"
    return "<u4"


@dataclass(frozen=True)
class _ShardSectionOffsets:
    """Offsets of the parts of a shard, in bytes from its beginning."""

    ends_at: int
    keys_at: int
    sums_at: int
    num_sums: int

    @classmethod
    def compute_from_counts(
        cls, num_tokens: int, num_documents: int, dtype: str
    ) -> _ShardSectionOffsets:
        token_bytes = num_tokens * np.dtype(dtype).itemsize
        ends_at = PAYLOAD_OFFSET + -(-token_bytes // WORD_BYTES) * WORD_BYTES
        keys_at = ends_at + num_documents * WORD_BYTES
        sums_at = keys_at + num_documents * WORD_BYTES
        return cls(ends_at, keys_at, sums_at, -(-(sums_at - PAYLOAD_OFFSET) // CHUNK_BYTES))

    @property
    def num_bytes(self) -> int:
        return self.sums_at + self.num_sums * WORD_BYTES


def pack_shard_header(facts: dict[str, Any]) -> tuple[bytes, str]:
    """The header of a shard with these facts, and its checksum in hex."""
    text = encode_canonical_json(facts).encode()
    checksum = xxhash.xxh3_64_intdigest(text)
    head = _SHARD_HEADER.pack(MAGIC, VERSION, len(text), checksum) + text
    assert len(head) <= PAYLOAD_OFFSET
    return head.ljust(PAYLOAD_OFFSET, b"\0"), f"{checksum:016x}"


def open_shard(path: Path) -> Shard:
    """Map a shard after looking at its header and size. Raises DataError (exit 4) that names what
    is wrong.
    """
    try:
        with open_regular_file(path) as file:
            facts, xxh3 = _parse_shard_header(path, file.read(PAYLOAD_OFFSET))
            num_bytes = os.fstat(file.fileno()).st_size
            # The map stays when the file is closed.
            mapped = _map_shard_file(file)
    except FileNotFoundError:
        raise DataError(
            "the shard is missing", where=str(path), fix="build the dataset again"
        ) from None
    except OSError as error:
        fix = None
        if error.errno == errno.EMFILE:
            fix = "raise ulimit -n, or build larger shards"
        raise build_unreadable_data_error(
            error, path, "the shard cannot be read", fix=fix
        ) from None
    num_tokens, num_documents, dtype = facts["num_tokens"], facts["num_documents"], facts["dtype"]
    sections = _ShardSectionOffsets.compute_from_counts(num_tokens, num_documents, dtype)
    if num_bytes != sections.num_bytes:
        summary = "the shard has bytes after its end"
        if num_bytes < sections.num_bytes:
            summary = "the shard is cut off"
        raise _build_damaged_shard_error(
            path, summary, f"{num_bytes} bytes instead of {sections.num_bytes}"
        )
    ends = np.frombuffer(mapped, "<u8", num_documents, sections.ends_at)
    if int(ends[-1]) != num_tokens:
        why = f"the last document ends at token {int(ends[-1])} of {num_tokens}"
        raise _build_damaged_shard_error(path, "the shard's documents do not add up", why)
    return Shard(
        path=path,
        facts=ShardFacts(
            path.name,
            num_tokens,
            num_documents,
            facts["max_token_id"],
            num_bytes,
            xxh3,
            facts["continues"],
        ),
        vocab_size=facts["vocab_size"],
        dtype=dtype,
        tokenizer_digest=facts["tokenizer_digest"],
        tokens=np.frombuffer(mapped, dtype, num_tokens, PAYLOAD_OFFSET),
        ends=ends,
        keys=np.frombuffer(mapped, "<u8", num_documents, sections.keys_at),
        payload=memoryview(mapped)[PAYLOAD_OFFSET : sections.sums_at],
        sums=np.frombuffer(mapped, "<u8", sections.num_sums, sections.sums_at),
    )


def _map_shard_file(file: BinaryIO) -> mmap.mmap:
    """All of a file, read-only."""
    options: dict[str, Any] = {}
    # Python keeps a file descriptor for each map; from 3.13 on it can do without.
    if sys.version_info >= (3, 13):
        options["trackfd"] = False
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **options)


def _build_damaged_shard_error(path: Path, summary: str, why: str) -> DataError:
    return DataError(
        summary, where=str(path), why=why, fix="build the dataset again, or copy the shard again"
    )


def _parse_shard_header(path: Path, head: bytes) -> tuple[dict[str, Any], str]:
    """The header's facts and checksum. DataError unless they can be relied upon."""
    if not head:
        raise _build_damaged_shard_error(path, "the shard is empty", "it has 0 bytes")
    if len(head) < PAYLOAD_OFFSET and head.startswith(MAGIC):
        raise _build_damaged_shard_error(
            path,
            "the shard is cut off",
            f"its header has {len(head)} bytes instead of {PAYLOAD_OFFSET}",
        )
    if not head.startswith(MAGIC):
        raise _build_damaged_shard_error(path, "not a token shard", f"it begins with {head[:8]!r}")
    _, version, length, xxh3 = _SHARD_HEADER.unpack_from(head)
    text = head[_SHARD_HEADER.size : _SHARD_HEADER.size + length]
    if version != VERSION:
        raise DataError(
            f"format {version} is not {VERSION}",
            where=str(path),
            fix="use the release that wrote it",
        )
    # Behind the JSON there are zeros, which its checksum does not cover.
    if xxhash.xxh3_64_intdigest(text) != xxh3 or head[_SHARD_HEADER.size + len(text) :].strip(
        b"\0"
    ):
        raise _build_damaged_shard_error(
            path,
            "the shard's header is not what was written",
            f"bytes 0 to {PAYLOAD_OFFSET}: checksum differs",
        )
    facts = json.loads(text)
    if facts["dtype"] not in TOKEN_DTYPES or facts["chunk_bytes"] != CHUNK_BYTES:
        raise DataError(
            "written by another release", where=str(path), fix="use the release that wrote it"
        )
    if not facts["num_tokens"] or not facts["num_documents"]:
        raise _build_damaged_shard_error(path, "the shard is empty", "it has no tokens")
    if facts["max_token_id"] >= facts["vocab_size"]:
        why = f"the vocabulary has {facts['vocab_size']}"
        raise _build_damaged_shard_error(
            path, f"the shard holds token {facts['max_token_id']}", why
        )
    return facts, f"{xxh3:016x}"


def verify_shard(path: Path, progress: Progress | None = None) -> list[DataError]:
    """Read all of a shard and compare it with its checksums. A flipped bit is named by the 64 KiB
    it is in.
    """
    try:
        shard = open_shard(path)
    except DataError as error:
        return [error]
    sections = _ShardSectionOffsets.compute_from_counts(
        shard.facts.num_tokens, shard.facts.num_documents, shard.dtype
    )
    try:
        ranges = _merge_adjacent_ranges(_find_damaged_ranges(shard, sections, progress))
        damaged = [
            _describe_damage_in_range(shard, sections, start, stop) for start, stop in ranges
        ]
    except _DamagedChecksumsError:
        return [
            _build_damaged_shard_error(
                path,
                "the shard's checksums are not what was written",
                f"from byte {sections.sums_at} on",
            )
        ]
    except OSError as error:
        return [build_unreadable_data_error(error, path, "the shard cannot be read")]
    return damaged or list(_find_contradictions_in_sound_shard(shard))


class _DamagedChecksumsError(Exception):
    """The list of checksums is itself damaged."""


def _find_damaged_ranges(
    shard: Shard, sections: _ShardSectionOffsets, progress: Progress | None
) -> Iterator[tuple[int, int]]:
    """Byte ranges whose checksum differs."""
    with open_regular_file(shard.path) as file:
        facts, _ = _parse_shard_header(shard.path, file.read(PAYLOAD_OFFSET))
        file.seek(sections.sums_at)
        raw = file.read()
        # First, for with these damaged every chunk would seem to be.
        if xxhash.xxh3_64_hexdigest(raw) != facts["sums_xxh3"]:
            raise _DamagedChecksumsError
        file.seek(PAYLOAD_OFFSET)
        expected = iter(np.frombuffer(raw, "<u8").tolist())
        at = PAYLOAD_OFFSET
        while data := memoryview(file.read(min(_READ_BYTES, sections.sums_at - at))):
            for start in range(0, len(data), CHUNK_BYTES):
                chunk = data[start : start + CHUNK_BYTES]
                if xxhash.xxh3_64_intdigest(chunk) != next(expected):
                    yield at + start, at + start + len(chunk)
            at += len(data)
            if progress is not None:
                progress(len(data))


def _merge_adjacent_ranges(ranges: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours become one range."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _describe_damage_in_range(
    shard: Shard, sections: _ShardSectionOffsets, start: int, stop: int
) -> DataError:
    contents: list[str] = []
    itemsize = np.dtype(shard.dtype).itemsize
    if start < sections.ends_at:
        first = (start - PAYLOAD_OFFSET) // itemsize
        last = (min(stop, sections.ends_at) - PAYLOAD_OFFSET - 1) // itemsize
        # Behind the last token there may be zeros.
        contents.append(f"tokens {first} to {min(last, shard.facts.num_tokens - 1)}")
    if stop > sections.ends_at:
        contents.append("where documents end and who they are")
    return _build_damaged_shard_error(
        shard.path,
        f"bytes {start} to {stop} are not what was written",
        f"checksum differs; {', '.join(contents)}",
    )


def _find_contradictions_in_sound_shard(shard: Shard) -> Iterator[DataError]:
    """Errors of a shard whose checksums are good: another writer's contradictions."""
    high = -1
    # In parts: the file cache need not hold all of a shard at once.
    for at in range(0, len(shard.tokens), _READ_BYTES):
        high = max(high, int(shard.tokens[at : at + _READ_BYTES].max()))
    if high != shard.facts.max_token_id:
        why = f"its header says {shard.facts.max_token_id}, the vocabulary has {shard.vocab_size}"
        yield _build_damaged_shard_error(shard.path, f"the largest token is {high}", why)
    if bool((np.diff(shard.ends.astype(np.int64), prepend=0) <= 0).any()):
        yield _build_damaged_shard_error(
            shard.path,
            "documents do not end one after another",
            "an end lies before the one before it",
        )
