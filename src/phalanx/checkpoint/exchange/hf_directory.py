"""Exports a run of a Hugging Face model as a directory again: its own names, its own config.json.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.checkpoint.exchange.hf_export import (
    CONFIG,
    Exported,
    ExportExtras,
    Progress,
    Rounding,
    common_dtype,
    round_tensor,
    write_shards,
)
from phalanx.checkpoint.exchange.new_directory import copy_file, new_directory
from phalanx.checkpoint.exchange.tensor_readers import TensorReader
from phalanx.checkpoint.exchange.translate import RenamedTensor
from phalanx.core.disk import Disk, write_json_durably


def export_own_directory(
    weights: TensorReader,
    config: Mapping[str, Any],
    out: Path,
    *,
    shard_bytes: int,
    rounding: Rounding | None = None,
    extras: ExportExtras,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Write the directory `out`: weights under the names that they have, `config`, and `extras`.

    Raises UsageError if `out` is there, ResourceError if it cannot be written.
    """
    tensors = []
    for name, info in weights.tensors.items():
        tensor = RenamedTensor(name, info, partial(weights.load, name))
        tensors.append(round_tensor(tensor, rounding))
    dtype = common_dtype(tensors)
    settings = {**config, "dtype": dtype, "torch_dtype": dtype}
    total = sum(tensor.info.num_bytes for tensor in tensors)
    with new_directory(out) as partial_out:
        files = write_shards(partial_out, tensors, shard_bytes, lambda done: progress(done, total))
        for name, value in {CONFIG: settings, **extras.texts}.items():
            write_json_durably(Disk(), partial_out / name, value)
        for name, path in extras.files.items():
            copy_file(path, partial_out / name)
    architecture = str((config.get("architectures") or [config["model_type"]])[0])
    auto_class = "AutoModelForCausalLM"
    if "image_size" in config:
        auto_class = "AutoModelForImageClassification"
    names = (*files, CONFIG, *extras.texts, *extras.files)
    return Exported(architecture, auto_class, names, dtype, len(tensors), total)
