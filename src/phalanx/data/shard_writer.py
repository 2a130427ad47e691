"""Writes a shard: a stream of tokens and documents that gets its name when it is whole.
Torch-free."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.core.errors import DataError
from phalanx.core.files import create_regular_file, fsync_directory
from phalanx.data.shards import (
    CHUNK_BYTES,
    PAYLOAD_OFFSET,
    TOKEN_DTYPES,
    WORD_BYTES,
    ShardFacts,
    pack_shard_header,
)


class _ChunkChecksumStream:
    """XXH3-64 of each CHUNK_BYTES of a stream."""

    def __init__(self) -> None:
        self._hash, self._left = xxhash.xxh3_64(), CHUNK_BYTES
        self._done = array("Q")

    def update(self, data: memoryview) -> None:
        while len(data):
            part, data = data[: self._left], data[self._left :]
            self._hash.update(part)
            self._left -= len(part)
            if self._left == 0:
                self._finish()

    def _finish(self) -> None:
        self._done.append(self._hash.intdigest())
        self._hash, self._left = xxhash.xxh3_64(), CHUNK_BYTES

    def close(self) -> bytes:
        if self._left < CHUNK_BYTES:
            self._finish()
        return np.array(self._done, "<u8").tobytes()


class ShardWriter:
    """Writes a shard beside `path` as a stream; `commit` gives it its name. Leaving without a
    commit removes it.

    Raises OSError, and DataError for an id that the vocabulary does not have. A document without
    tokens is none.
    """

    def __init__(
        self,
        path: Path,
        dtype: str,
        vocab_size: int,
        tokenizer_digest: str,
        *,
        continues: bool = False,
    ) -> None:
        assert dtype in TOKEN_DTYPES, dtype
        self._path, self._dtype, self._vocab_size = path, np.dtype(dtype), vocab_size
        self._tokenizer_digest, self._continues = tokenizer_digest, continues
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._file: BinaryIO | None = None
        self._sums = _ChunkChecksumStream()
        self._ends, self._keys = array("Q"), array("Q")
        self._num_tokens, self._max_token_id = 0, -1
        self._key: int | None = None  # of a document that has no token yet

    def __enter__(self) -> ShardWriter:
        self._file = create_regular_file(self._partial, buffering=1 << 20)
        # The header comes last: its checksum stands for all that lies behind it.
        self._file.write(b"\0" * PAYLOAD_OFFSET)
        return self

    def begin_document(self, key: int) -> None:
        """Begin the document `key` (a uint64): all that is written next belongs to it."""
        self._key = key

    def write(self, tokens: NDArray[np.integer]) -> None:
        """Append a part, of any size, of the current document."""
        self.write_documents(tokens, np.zeros(0, np.int64), [])

    def write_documents(
        self, tokens: NDArray[np.integer], starts: NDArray[np.int64], keys: list[int]
    ) -> None:
        """Append many documents at once: document `keys[i]` begins at tokens[starts[i]]; none of
        them is empty.

        What stands before the first start belongs to the document that is being written.
        """
        assert self._file is not None
        if tokens.size == 0:
            return
        self._require_ids_in_vocabulary(tokens)
        if self._key is not None and (starts.size == 0 or starts[0] > 0):
            starts, keys = np.concatenate([np.zeros(1, np.int64), starts]), [self._key, *keys]
        self._key = None
        assert self._keys or (starts.size and starts[0] == 0), "no document was begun"
        if starts.size:
            ends = starts.astype(np.uint64) + np.uint64(self._num_tokens)
            # A document ends where the next begins; none ends where the very first does.
            if not self._keys:
                ends = ends[1:]
            # array has the machine's order of bytes; `commit` writes the file's.
            self._ends.frombytes(ends.astype("=u8").tobytes())
            self._keys.extend(keys)
        self._append_bytes(np.ascontiguousarray(tokens, self._dtype).data.cast("B"))
        self._num_tokens += tokens.size

    def _require_ids_in_vocabulary(self, tokens: NDArray[np.integer]) -> None:
        low, high = int(tokens.min()), int(tokens.max())
        for token, is_outside in ((low, low < 0), (high, high >= self._vocab_size)):
            if is_outside:
                raise DataError(
                    f"token {token} does not fit a vocabulary of {self._vocab_size}",
                    where=str(self._path),
                )
        self._max_token_id = max(self._max_token_id, high)

    def _append_bytes(self, data: memoryview) -> None:
        assert self._file is not None
        self._file.write(data)
        self._sums.update(data)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def commit(self) -> ShardFacts:
        """Make the bytes durable and give the file its name. It must hold a token."""
        assert self._file is not None
        assert self._num_tokens, "an empty shard is never written"
        self._ends.append(self._num_tokens)
        # What follows is mapped as uint64, which must be aligned.
        padding = -(self._num_tokens * self._dtype.itemsize) % WORD_BYTES
        self._append_bytes(memoryview(b"\0" * padding))
        for column in (self._ends, self._keys):
            self._append_bytes(np.array(column, "<u8").data.cast("B"))
        sums = self._sums.close()
        self._file.write(sums)
        num_bytes = self._file.tell()
        head, checksum = pack_shard_header(self._build_header_facts(sums))
        self._file.seek(0)
        self._file.write(head)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        # Its bytes are durable by now: a name never leads to a part of a shard.
        os.replace(self._partial, self._path)
        fsync_directory(self._path.parent)
        return ShardFacts(
            file=self._path.name,
            num_tokens=self._num_tokens,
            num_documents=len(self._keys),
            max_token_id=self._max_token_id,
            num_bytes=num_bytes,
            xxh3=checksum,
            continues=self._continues,
        )

    def _build_header_facts(self, sums: bytes) -> dict[str, Any]:
        return {
            "dtype": self._dtype.str,
            "num_tokens": self._num_tokens,
            "num_documents": len(self._keys),
            "max_token_id": self._max_token_id,
            "vocab_size": self._vocab_size,
            "tokenizer_digest": self._tokenizer_digest,
            "continues": self._continues,
            "chunk_bytes": CHUNK_BYTES,
            "sums_xxh3": xxhash.xxh3_64_hexdigest(sums),
        }

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file is not None
        try:
            self._file.close()
        except OSError:  # what could not be flushed goes with the file
            if kind is None:
                raise
        finally:
            # After a commit it has another name, and nothing is left to remove.
            self._partial.unlink(missing_ok=True)
