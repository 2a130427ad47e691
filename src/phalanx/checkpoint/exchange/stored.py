"""A checkpoint's weights as a bag of whole tensors, every byte verified before it is handed out. Torch-free."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from phalanx.checkpoint.exchange.bags import Bits, Described, bits_type
from phalanx.checkpoint.folder import Folder, as_folder
from phalanx.checkpoint.manifest import read_manifest
from phalanx.checkpoint.shard_file import DTYPES, CheckedFile
from phalanx.checkpoint.verify import require_whole_directory
from phalanx.core.errors import CheckpointError


class StoredBag:
    """A context manager; its files stay open inside. Raises CheckpointError."""

    def __init__(self, place: Folder | Path) -> None:
        self.folder = as_folder(place)
        self.manifest = read_manifest(self.folder)
        require_whole_directory(self.folder, self.manifest)
        self.where = self.folder.url
        self._stored = self.manifest.without_optimizer().tensors
        for name, tensor in self._stored.items():
            if tensor.dtype not in DTYPES:
                raise CheckpointError(f"{name} is of type {tensor.dtype}, which nobody writes", where=self.where)
        self.tensors = {name: Described(tensor.shape, tensor.dtype) for name, tensor in self._stored.items()}
        self._files: dict[str, CheckedFile] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> StoredBag:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def load(self, name: str) -> Bits:
        """The whole tensor, from the pieces of whatever ranks wrote it."""
        stored = self._stored[name]
        dtype = bits_type(stored.dtype)
        whole = np.empty(stored.shape, dtype)
        filled = 0
        for piece in stored.pieces:
            file = self._file(piece.file)
            entry = file.entries.get(piece.key)
            if entry is None or (entry.shape, entry.dtype) != (piece.size, DTYPES[stored.dtype][0]):
                raise CheckpointError(f"{piece.key} is not the block of {name} it should be", where=file.where)
            block = file.read_block(entry, (0,) * len(piece.size), piece.size).view(dtype).reshape(piece.size)
            whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))] = block
            filled += block.size
        if filled != whole.size:
            raise CheckpointError(f"{name} is not whole in the checkpoint", where=self.where)
        return whole

    def _file(self, name: str) -> CheckedFile:
        if name not in self._files:
            self._files[name] = self._open.enter_context(CheckedFile(self.folder, name, self.manifest.files[name]))
        return self._files[name]
