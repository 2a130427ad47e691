"""Reads a checkpoint's weights for exports. Torch-free."""

from __future__ import annotations

from pathlib import Path

from phalanx.checkpoint.exchange.tensor_readers import TensorShapeAndDtype
from phalanx.checkpoint.folder import CheckpointFolder, convert_path_to_folder
from phalanx.checkpoint.manifest import read_manifest
from phalanx.checkpoint.reading.full_tensors import FullTensorReader
from phalanx.checkpoint.reading.verify import require_files_of_manifest
from phalanx.checkpoint.shard_file import SAFETENSORS_DTYPE_OF_TORCH_DTYPE
from phalanx.core.errors import CheckpointError


class CheckpointReader(FullTensorReader):
    """Reads full tensors of a checkpoint without the optimizer's state. Raises CheckpointError."""

    def __init__(self, folder: CheckpointFolder | Path) -> None:
        folder = convert_path_to_folder(folder)
        manifest = read_manifest(folder)
        require_files_of_manifest(folder, manifest)
        super().__init__(folder, manifest.keep_model_tensors())
        self.where = folder.url
        for name, tensor in self.manifest.tensors.items():
            if tensor.dtype not in SAFETENSORS_DTYPE_OF_TORCH_DTYPE:
                raise CheckpointError(
                    f"{name} is of type {tensor.dtype}, which no release writes", where=self.where
                )
        self.tensors = {
            name: TensorShapeAndDtype(tensor.shape, tensor.dtype)
            for name, tensor in self.manifest.tensors.items()
        }
