"""Whole tensors of one checkpoint, whatever layout wrote it, verified before they are handed out. Torch-free."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from phalanx.checkpoint.folder import Folder, as_folder
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.shard_file import DTYPES, CheckedFile
from phalanx.checkpoint.verify import is_tiled
from phalanx.core.errors import CheckpointError

Bits = NDArray[Any]


def bits_type(dtype: str) -> np.dtype[Any]:
    """The unsigned integer that holds one element of torch's `dtype`."""
    return np.dtype(f"u{DTYPES[dtype][1]}")


class WholeTensors:
    """A context manager; files stay open inside. Raises CheckpointError."""

    def __init__(self, place: Folder | Path, manifest: Manifest) -> None:
        self.folder, self.manifest = as_folder(place), manifest
        self._files: dict[str, CheckedFile] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def load(self, name: str) -> Bits:
        """A tensor's bits, as unsigned integers of its element's size."""
        stored = self.manifest.tensors[name]
        if stored.dtype not in DTYPES:
            raise CheckpointError(f"{name} is of type {stored.dtype}, which nobody writes", where=self.folder.url)
        dtype = bits_type(stored.dtype)
        if not is_tiled(stored):
            raise CheckpointError(f"{name} is not whole in the checkpoint", where=self.folder.url)
        whole = np.empty(stored.shape, dtype)
        for piece in stored.pieces:
            file = self._file(piece.file)
            entry = file.entries.get(piece.key)
            if entry is None or (entry.shape, entry.dtype) != (piece.size, DTYPES[stored.dtype][0]):
                raise CheckpointError(f"{piece.key} is not the block of {name} it should be", where=file.where)
            block = file.read_block(entry, (0,) * len(piece.size), piece.size).view(dtype).reshape(piece.size)
            whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))] = block
        return whole

    def _file(self, name: str) -> CheckedFile:
        if name not in self._files:
            self._files[name] = self._open.enter_context(CheckedFile(self.folder, name, self.manifest.files[name]))
        return self._files[name]
