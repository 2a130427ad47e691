"""Reads full tensors of one checkpoint, whatever layout wrote it; returns verified bytes only.

Torch-free.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from phalanx.checkpoint.folder import CheckpointFolder, convert_path_to_folder
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.reading.verify import is_tiled_by_pieces
from phalanx.checkpoint.shard_file import SAFETENSORS_DTYPE_OF_TORCH_DTYPE, VerifiedSafetensorsFile
from phalanx.core.errors import CheckpointError

Bits = NDArray[Any]


def choose_unsigned_bits_dtype(dtype: str) -> np.dtype[Any]:
    """The unsigned integer that holds one element of torch's `dtype`."""
    return np.dtype(f"u{SAFETENSORS_DTYPE_OF_TORCH_DTYPE[dtype][1]}")


def subtract_offsets(start: tuple[int, ...], offset: tuple[int, ...]) -> tuple[int, ...]:
    """`start` of a tensor counted from `offset`, dimension by dimension."""
    return tuple(position - origin for position, origin in zip(start, offset, strict=True))


def build_box_slices(start: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    """The slices of the elements [start, start + size)."""
    return tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))


class FullTensorReader:
    """Reads full tensors by name; a context manager, inside of which files stay open.

    Raises CheckpointError.
    """

    def __init__(self, folder: CheckpointFolder | Path, manifest: Manifest) -> None:
        self.folder, self.manifest = convert_path_to_folder(folder), manifest
        self._files: dict[str, VerifiedSafetensorsFile] = {}
        self._tiled: set[str] = set()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def load(self, name: str) -> Bits:
        """A tensor's bits, as unsigned integers of its element's size."""
        shape = self.manifest.tensors[name].shape
        return self._load_box_of_tensor(name, (0,) * len(shape), shape)

    def load_element(self, name: str, number: int) -> Bits:
        """The bits at index `number` of the first dimension; nothing else of the tensor is read."""
        shape = self.manifest.tensors[name].shape
        return self._load_box_of_tensor(name, (number,) + (0,) * (len(shape) - 1), (1, *shape[1:]))[
            0
        ]

    def _load_box_of_tensor(
        self, name: str, offset: tuple[int, ...], size: tuple[int, ...]
    ) -> Bits:
        stored = self.manifest.tensors[name]
        if stored.dtype not in SAFETENSORS_DTYPE_OF_TORCH_DTYPE:
            raise CheckpointError(
                f"{name} is of type {stored.dtype}, which no release writes", where=self.folder.url
            )
        dtype = choose_unsigned_bits_dtype(stored.dtype)
        # Of a piece that is there twice another one may be missing: `np.empty` would show through.
        if name not in self._tiled and not is_tiled_by_pieces(stored):
            raise CheckpointError(f"{name} is not whole in the checkpoint", where=self.folder.url)
        self._tiled.add(name)
        bits = np.empty(size, dtype)
        for piece in stored.pieces:
            overlap = piece.intersect_with_box(offset, size)
            if overlap is None:
                continue
            start, length = overlap
            file = self._open_verified_file(piece.file)
            entry = file.entries.get(piece.key)
            if entry is None or (entry.shape, entry.dtype) != (
                piece.size,
                SAFETENSORS_DTYPE_OF_TORCH_DTYPE[stored.dtype][0],
            ):
                raise CheckpointError(
                    f"{piece.key} is not the block of {name} it should be", where=file.where
                )
            in_piece = subtract_offsets(start, piece.offset)
            block = file.read_box_of_entry(entry, in_piece, length).view(dtype).reshape(length)
            in_box = subtract_offsets(start, offset)
            bits[build_box_slices(in_box, length)] = block
        return bits

    def _open_verified_file(self, name: str) -> VerifiedSafetensorsFile:
        if name not in self._files:
            # Opened once: its header is verified and parsed at each opening.
            self._files[name] = self._open.enter_context(
                VerifiedSafetensorsFile(self.folder, name, self.manifest.files[name])
            )
        return self._files[name]
