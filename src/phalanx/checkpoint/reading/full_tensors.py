"""Reads full tensors of one checkpoint, whatever layout wrote it; returns verified bytes only.

Torch-free.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from phalanx.checkpoint.folder import Folder, as_folder
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.reading.verify import is_tiled
from phalanx.checkpoint.shard_file import DTYPES, CheckedFile
from phalanx.core.errors import CheckpointError

Bits = NDArray[Any]


def bits_type(dtype: str) -> np.dtype[Any]:
    """The unsigned integer that holds one element of torch's `dtype`."""
    return np.dtype(f"u{DTYPES[dtype][1]}")


class FullTensorReader:
    """Reads full tensors by name; a context manager, inside of which files stay open.

    Raises CheckpointError.
    """

    def __init__(self, folder: Folder | Path, manifest: Manifest) -> None:
        self.folder, self.manifest = as_folder(folder), manifest
        self._files: dict[str, CheckedFile] = {}
        self._tiled: set[str] = set()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def load(self, name: str) -> Bits:
        """A tensor's bits, as unsigned integers of its element's size."""
        shape = self.manifest.tensors[name].shape
        return self._load_box(name, (0,) * len(shape), shape)

    def load_element(self, name: str, number: int) -> Bits:
        """The bits at index `number` of the first dimension; nothing else of the tensor is read."""
        shape = self.manifest.tensors[name].shape
        return self._load_box(name, (number,) + (0,) * (len(shape) - 1), (1, *shape[1:]))[0]

    def _load_box(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Bits:
        stored = self.manifest.tensors[name]
        if stored.dtype not in DTYPES:
            raise CheckpointError(
                f"{name} is of type {stored.dtype}, which nobody writes", where=self.folder.url
            )
        dtype = bits_type(stored.dtype)
        if name not in self._tiled and not is_tiled(stored):
            raise CheckpointError(f"{name} is not whole in the checkpoint", where=self.folder.url)
        self._tiled.add(name)
        bits = np.empty(size, dtype)
        for piece in stored.pieces:
            overlap = piece.overlap(offset, size)
            if overlap is None:
                continue
            start, length = overlap
            file = self._file(piece.file)
            entry = file.entries.get(piece.key)
            if entry is None or (entry.shape, entry.dtype) != (piece.size, DTYPES[stored.dtype][0]):
                raise CheckpointError(
                    f"{piece.key} is not the block of {name} it should be", where=file.where
                )
            in_piece = tuple(s - o for s, o in zip(start, piece.offset, strict=True))
            block = file.read_block(entry, in_piece, length).view(dtype).reshape(length)
            in_box = tuple(
                slice(s - o, s - o + n) for s, o, n in zip(start, offset, length, strict=True)
            )
            bits[in_box] = block
        return bits

    def _file(self, name: str) -> CheckedFile:
        if name not in self._files:
            self._files[name] = self._open.enter_context(
                CheckedFile(self.folder, name, self.manifest.files[name])
            )
        return self._files[name]
