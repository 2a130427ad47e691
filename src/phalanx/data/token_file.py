"""One file of token ids, written as a stream: whole or absent, with the facts that a manifest keeps about it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenFile:
    """What a token file holds. `num_documents` counts documents with at least one token in it."""

    file: str
    num_tokens: int
    num_documents: int
    max_token_id: int  # -1: the file is empty
    xxh3: str  # hex of XXH3-64 over the file's bytes


class TokenWriter:
    """Writes little-endian ids beside `path`; `commit` gives the file its name. Leaving without a commit removes it.

    Raises OSError. The temporary name is fixed, so that what a killed process left is overwritten by the next.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self._path, self._dtype = path, np.dtype(dtype)
        self._partial = path.with_name(f".{path.name}.partial")
        self._file: BinaryIO | None = None
        self._hash = xxhash.xxh3_64()
        self._num_tokens, self._num_documents, self._max_token_id = 0, 0, -1
        self._in_new_document = True

    def __enter__(self) -> TokenWriter:
        self._file = open(self._partial, "wb")
        return self

    def begin_document(self) -> None:
        self._in_new_document = True

    def write(self, tokens: NDArray[np.integer]) -> None:
        """Append ids that are known to fit the type."""
        if tokens.size == 0:
            return
        assert self._file is not None
        data = np.ascontiguousarray(tokens, self._dtype).data.cast("B")
        self._file.write(data)
        self._hash.update(data)
        self._num_tokens += tokens.size
        self._num_documents += self._in_new_document
        self._max_token_id = max(self._max_token_id, int(tokens.max()))
        self._in_new_document = False

    def commit(self) -> TokenFile:
        """Make the bytes durable and give the file its name. The folder's own fsync is the caller's."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, self._path)
        return TokenFile(
            self._path.name, self._num_tokens, self._num_documents, self._max_token_id, self._hash.hexdigest()
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        try:
            self._file.close()
        finally:
            self._partial.unlink(missing_ok=True)
