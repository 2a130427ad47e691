"""Exports a checkpoint as transformers opens it: safetensors, config.json, the tokenizer.

One tensor is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.checkpoint.exchange.families import find_family_of_model_type
from phalanx.checkpoint.exchange.new_directory import copy_file_durably, create_directory_atomically
from phalanx.checkpoint.exchange.settings import build_hugging_face_config
from phalanx.checkpoint.exchange.tensor_readers import (
    SAFETENSORS_FILE_NAME,
    SAFETENSORS_INDEX_FILE_NAME,
    StackElementReader,
    TensorReader,
    TensorShapeAndDtype,
)
from phalanx.checkpoint.exchange.translate import RenamedTensorBlock, translate_to_hugging_face
from phalanx.checkpoint.reading.full_tensors import Bits
from phalanx.checkpoint.reading.mismatch import (
    ExpectedShapeAndDtype,
    MismatchError,
    find_tensor_mismatches,
)
from phalanx.checkpoint.shard_file import Bytes, TensorToWrite, write_safetensors_stream
from phalanx.core.disk import Disk, write_json_durably
from phalanx.job.shapes.transformer import TransformerShape

CONFIG_FILE_NAME = "config.json"
# transformers requires it.
TRANSFORMERS_SAFETENSORS_METADATA = {"format": "pt"}

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class HuggingFaceExportResult:
    """An exported directory; sizes in bytes."""

    architecture: str
    auto_class: str
    files: tuple[str, ...]
    dtype: str
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExportDtypeRounding:
    """A rounding to `dtype` (torch's name) by `cast`: `casts.round_float_bits_to_dtype`, which
    needs torch."""

    dtype: str
    cast: Callable[[Bits, str, str], Bits]


@dataclass(frozen=True)
class ExtraConfigAndFiles:
    """Additions to the weights: settings on top of config.json's, and files to copy under their
    names."""

    settings: Mapping[str, Any]
    files: Mapping[str, Path]
    texts: Mapping[str, Any]
    """JSON files by name."""
    max_positions: int = 0
    """The longest sequence that the model was trained on."""


def export_hugging_face_directory(
    weights: StackElementReader,
    shape: TransformerShape,
    out: Path,
    *,
    shard_bytes: int,
    rounding: ExportDtypeRounding | None = None,
    extras: ExtraConfigAndFiles | None = None,
    progress: Progress = lambda done, total: None,
) -> HuggingFaceExportResult:
    """Write the directory `out`. Without `rounding` weights stay as they are.

    Raises LayoutError if transformers has no model that computes this one, MismatchError if the
    weights are not those of `shape`, UsageError if `out` is there, ResourceError if it cannot be
    written.
    """
    extras = extras or ExtraConfigAndFiles({}, {}, {})
    config = build_hugging_face_config(
        shape, max_positions=extras.max_positions, more=extras.settings
    )
    family = find_family_of_model_type(config["model_type"])
    shapes = shape.list_stored_tensors()
    _require_weights_of_shapes(shapes, weights)
    tensors = []
    for tensor in translate_to_hugging_face(family, shapes, weights):
        tensors.append(round_tensor_source(tensor, rounding))
    # Newer releases of transformers read "dtype", older ones "torch_dtype".
    config["dtype"] = config["torch_dtype"] = choose_common_dtype(tensors)
    total = sum(tensor.info.num_bytes for tensor in tensors)
    with create_directory_atomically(out) as partial_out:
        files = write_safetensors_files(
            partial_out, tensors, shard_bytes, lambda done: progress(done, total)
        )
        for name, value in {CONFIG_FILE_NAME: config, **extras.texts}.items():
            write_json_durably(Disk(), partial_out / name, value)
        for name, path in extras.files.items():
            copy_file_durably(path, partial_out / name)
    names = (*files, CONFIG_FILE_NAME, *extras.texts, *extras.files)
    return HuggingFaceExportResult(
        family.architecture,
        family.auto_class,
        names,
        config["dtype"],
        len(tensors),
        total,
        notes=tuple(filter(None, [family.note])),
    )


def choose_common_dtype(tensors: Sequence[RenamedTensorBlock]) -> str:
    """The type of all `tensors`; "float32" if they have several, which holds the numbers of any."""
    dtypes = {tensor.info.dtype for tensor in tensors}
    if len(dtypes) == 1:
        return dtypes.pop()
    return "float32"


def _require_weights_of_shapes(
    shapes: Mapping[str, tuple[int, ...]], weights: TensorReader
) -> None:
    expected = {name: ExpectedShapeAndDtype(shape) for name, shape in shapes.items()}
    mismatches = find_tensor_mismatches(expected, weights.tensors)
    if mismatches:
        raise MismatchError(
            "the checkpoint does not hold the weights of this run's model",
            mismatches,
            where=weights.where,
            fix="a model with tensors of your own cannot be exported",
        )


def round_tensor_source(
    tensor: RenamedTensorBlock, rounding: ExportDtypeRounding | None
) -> RenamedTensorBlock:
    """`tensor` with its load rounded; unchanged without `rounding`, or if not floating-point."""
    old = tensor.info.dtype
    if rounding is None or old == rounding.dtype or not old.startswith(("float", "bfloat")):
        return tensor
    new, cast = rounding.dtype, rounding.cast
    return replace(
        tensor,
        info=TensorShapeAndDtype(tensor.info.shape, new),
        load=lambda: cast(tensor.load(), old, new),
    )


def write_safetensors_files(
    directory: Path,
    tensors: Sequence[RenamedTensorBlock],
    shard_bytes: int,
    progress: Callable[[int], None],
) -> list[str]:
    """Write one file, or several and an index. Returns their names."""
    shards = list(group_tensors_into_files(tensors, shard_bytes))
    # The names that transformers looks for.
    names = [SAFETENSORS_FILE_NAME]
    if len(shards) > 1:
        numbers = range(1, len(shards) + 1)
        names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in numbers]
    done = 0
    weight_map = {}
    for name, shard in zip(names, shards, strict=True):
        sources = []
        for tensor in shard:
            done += tensor.info.num_bytes
            sources.append(make_safetensors_source(tensor, tensor.name, partial(progress, done)))
            weight_map[tensor.name] = name
        write_safetensors_for_transformers(directory / name, sources)
    if len(shards) > 1:
        index = {"metadata": {"total_size": done}, "weight_map": weight_map}
        write_json_durably(Disk(), directory / SAFETENSORS_INDEX_FILE_NAME, index)
        names.append(SAFETENSORS_INDEX_FILE_NAME)
    return names


def group_tensors_into_files(
    tensors: Sequence[RenamedTensorBlock], shard_bytes: int
) -> Iterator[list[RenamedTensorBlock]]:
    """Yield groups of tensors in order, as many as fit into `shard_bytes`; a tensor that is larger
    has a file of its own."""
    shard: list[RenamedTensorBlock] = []
    num_bytes = 0
    for tensor in tensors:
        # Not before the first: a tensor that is larger than a file has one of its own.
        if shard and num_bytes + tensor.info.num_bytes > shard_bytes:
            yield shard
            shard, num_bytes = [], 0
        shard.append(tensor)
        num_bytes += tensor.info.num_bytes
    yield shard


def make_safetensors_source(
    tensor: RenamedTensorBlock, key: str, before: Callable[[], None]
) -> TensorToWrite:
    """The Source of a safetensors file; `before` is called when the tensor's turn comes."""

    def load() -> Bytes:
        before()
        return convert_bits_to_bytes(tensor.load())

    return TensorToWrite(key, tensor.info.dtype, tensor.info.shape, load)


def convert_bits_to_bytes(bits: Bits) -> Bytes:
    """The bytes of `bits` in C order."""
    as_bytes: Bytes = np.ascontiguousarray(bits).reshape(-1).view(np.uint8)
    return as_bytes


def write_safetensors_for_transformers(path: Path, sources: Sequence[TensorToWrite]) -> None:
    """Write a safetensors file with the metadata that transformers requires, durably.

    Raises OSError.
    """
    file = Disk().create(path)
    try:
        write_safetensors_stream(file, sources, metadata=TRANSFORMERS_SAFETENSORS_METADATA)
        file.sync()
    finally:
        file.close()
