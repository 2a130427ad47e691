"""Reads a checkpoint's weights for exports. Torch-free."""

from __future__ import annotations

from pathlib import Path

from phalanx.checkpoint.exchange.tensor_readers import TensorInfo
from phalanx.checkpoint.folder import Folder, as_folder
from phalanx.checkpoint.manifest import read_manifest
from phalanx.checkpoint.reading.full_tensors import FullTensorReader
from phalanx.checkpoint.reading.verify import require_complete_directory
from phalanx.checkpoint.shard_file import SAFETENSORS_DTYPES
from phalanx.core.errors import CheckpointError


class CheckpointReader(FullTensorReader):
    """Reads full tensors of a checkpoint without the optimizer's state. Raises CheckpointError."""

    def __init__(self, folder: Folder | Path) -> None:
        folder = as_folder(folder)
        manifest = read_manifest(folder)
        require_complete_directory(folder, manifest)
        super().__init__(folder, manifest.without_optimizer())
        self.where = folder.url
        for name, tensor in self.manifest.tensors.items():
            if tensor.dtype not in SAFETENSORS_DTYPES:
                raise CheckpointError(
                    f"{name} is of type {tensor.dtype}, which no release writes", where=self.where
                )
        self.tensors = {
            name: TensorInfo(tensor.shape, tensor.dtype)
            for name, tensor in self.manifest.tensors.items()
        }
