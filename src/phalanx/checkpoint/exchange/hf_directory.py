"""Exports a run of a Hugging Face model as a directory again: its own names, its own config.json.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.checkpoint.exchange.hf_export import (
    CONFIG_FILE_NAME,
    ExportDtypeRounding,
    ExtraConfigAndFiles,
    HuggingFaceExportResult,
    Progress,
    choose_common_dtype,
    round_tensor_source,
    write_safetensors_files,
)
from phalanx.checkpoint.exchange.new_directory import copy_file_durably, create_directory_atomically
from phalanx.checkpoint.exchange.tensor_readers import TensorReader
from phalanx.checkpoint.exchange.translate import RenamedTensorBlock
from phalanx.core.disk import Disk, write_json_durably


def export_unrenamed_weights(
    weights: TensorReader,
    config: Mapping[str, Any],
    out: Path,
    *,
    shard_bytes: int,
    rounding: ExportDtypeRounding | None = None,
    extras: ExtraConfigAndFiles,
    progress: Progress = lambda done, total: None,
) -> HuggingFaceExportResult:
    """Write the directory `out`: weights under the names that they have, `config`, and `extras`.

    Raises UsageError if `out` is there, ResourceError if it cannot be written.
    """
    tensors = []
    for name, info in weights.tensors.items():
        tensor = RenamedTensorBlock(name, info, partial(weights.load, name))
        tensors.append(round_tensor_source(tensor, rounding))
    dtype = choose_common_dtype(tensors)
    settings = {**config, "dtype": dtype, "torch_dtype": dtype}
    total = sum(tensor.info.num_bytes for tensor in tensors)
    with create_directory_atomically(out) as partial_out:
        files = write_safetensors_files(
            partial_out, tensors, shard_bytes, lambda done: progress(done, total)
        )
        for name, value in {CONFIG_FILE_NAME: settings, **extras.texts}.items():
            write_json_durably(Disk(), partial_out / name, value)
        for name, path in extras.files.items():
            copy_file_durably(path, partial_out / name)
    architecture = str((config.get("architectures") or [config["model_type"]])[0])
    auto_class = "AutoModelForCausalLM"
    if "image_size" in config:
        auto_class = "AutoModelForImageClassification"
    names = (*files, CONFIG_FILE_NAME, *extras.texts, *extras.files)
    return HuggingFaceExportResult(architecture, auto_class, names, dtype, len(tensors), total)
