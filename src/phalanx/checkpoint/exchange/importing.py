"""Imports foreign weights as a phalanx checkpoint: OUT looks like a run that has saved once, at
step 0, weights only.

OUT/checkpoints/step-0 is the checkpoint, OUT/model.toml the job file that fits it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.checkpoint.exchange.companion_files import find_companion_files
from phalanx.checkpoint.exchange.families import find_family_of_model_type
from phalanx.checkpoint.exchange.hf_export import (
    CONFIG_FILE_NAME,
    group_tensors_into_files,
    make_safetensors_source,
)
from phalanx.checkpoint.exchange.new_directory import copy_file_durably, create_directory_atomically
from phalanx.checkpoint.exchange.settings import convert_config_to_model_shape
from phalanx.checkpoint.exchange.tensor_readers import (
    StackElementReader,
    TensorReader,
    open_safetensors_reader,
)
from phalanx.checkpoint.exchange.translate import (
    RenamedTensorBlock,
    replace_stacks_by_elements,
    stack_expert_tensors,
    translate_from_hugging_face,
)
from phalanx.checkpoint.manifest import Manifest, StoredPiece, StoredTensorPieces
from phalanx.checkpoint.reading.mismatch import (
    ExpectedShapeAndDtype,
    MismatchError,
    find_tensor_mismatches,
)
from phalanx.checkpoint.shard_file import write_safetensors_stream
from phalanx.checkpoint.stores import open_store_of_run
from phalanx.core.disk import Disk, write_bytes_durably
from phalanx.core.errors import CheckpointError, LayoutError
from phalanx.job.hugging_face import read_config_values
from phalanx.job.shapes.stored_keys import REQUIRED_SHAPE_KEYS, STORED_SHAPE_DEFAULTS
from phalanx.job.shapes.transformer import TransformerShape

MAX_FILE_BYTES = 4 << 30
# Of two tensors that must be equal, at a time.
_NUM_ELEMENTS_AT_ONCE = 1 << 22
MODEL_TOML_FILE_NAME = "model.toml"
_SPECIAL_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What an export writes back into config.json, and no shape has.
COPIED_CONFIG_KEYS = (
    *_SPECIAL_TOKEN_KEYS,
    "max_position_embeddings",
    "id2label",
    "label2id",
)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class WeightsToImport:
    """Weights to import. Without a `shape` the tensors have the names that they came with."""

    origin: str
    tensors: tuple[RenamedTensorBlock, ...]
    """A tensor in several parts has them one after the other."""
    shape: TransformerShape | None = None
    settings: Mapping[str, Any] | None = None
    files: Mapping[str, Path] | None = None
    notes: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of tied tensors, and the one under which they are stored."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.info.num_bytes for tensor in self.tensors)


def read_config_json(source: Path) -> dict[str, Any]:
    """The config.json of a directory. Raises CheckpointError."""
    try:
        config = read_config_values(source / CONFIG_FILE_NAME)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "config.json cannot be read", where=str(source / CONFIG_FILE_NAME), why=str(error)
        ) from None
    if not isinstance(config, dict):
        raise CheckpointError("config.json is not an object", where=str(source / CONFIG_FILE_NAME))
    return config


def read_hugging_face_directory(
    source: Path, reader: StackElementReader | None = None
) -> WeightsToImport:
    """The weights of a directory with config.json; `reader` has its tensors where they are not in
    its safetensors files.

    Raises LayoutError for a model that phalanx does not have and for a head that config.json ties
    and that differs from the embedding, MismatchError for tensors that are not that model's.
    """
    config = read_config_json(source)
    try:
        shape = convert_config_to_model_shape(config)
    except LayoutError as error:
        error.where = str(source / CONFIG_FILE_NAME)
        raise
    family, shapes = find_family_of_model_type(config["model_type"]), shape.list_stored_tensors()
    translated = translate_from_hugging_face(
        family, shapes, reader or open_safetensors_reader(source)
    )
    stored = {name: tensor.info for name, tensor in translated.tensors.items()}
    expected = {
        name: ExpectedShapeAndDtype(size)
        for name, size in replace_stacks_by_elements(shapes).items()
    }
    mismatches = find_tensor_mismatches(expected, stored | translated.unknown)
    if mismatches:
        raise MismatchError(
            f"the weights are not those of the {family.architecture} that config.json describes",
            mismatches,
            where=str(source),
        )
    try:
        tensors = tuple(stack_expert_tensors(shapes, translated.tensors))
    except CheckpointError as error:
        error.where = error.where or str(source)
        raise
    # Without a null that config.json says, transformers would take a token of its own.
    settings = {
        key: config[key]
        for key in COPIED_CONFIG_KEYS
        if config.get(key) is not None or (key in _SPECIAL_TOKEN_KEYS and key in config)
    }
    files = find_companion_files(source)
    notes = []
    for head in translated.tied_heads:
        if not _have_same_bits(head, translated.tensors["embed.weight"]):
            raise LayoutError(
                f"{head.name} is not the embedding, and config.json says that they are one",
                where=str(source / CONFIG_FILE_NAME),
                fix="set tie_word_embeddings to false in it",
            )
        notes.append(f"{head.name} is left out: the embedding is the head, config.json says")
    return WeightsToImport(str(source), tensors, shape, settings, files, tuple(notes))


def _have_same_bits(block: RenamedTensorBlock, other: RenamedTensorBlock) -> bool:
    """True if two tensors are the same, with their type; compares a few rows at a time."""
    if block.info != other.info:
        return False
    bits, other_bits = block.load(), other.load()
    num_rows = max(1, _NUM_ELEMENTS_AT_ONCE // max(1, math.prod(block.info.shape[1:])))
    return all(
        np.array_equal(bits[start : start + num_rows], other_bits[start : start + num_rows])
        for start in range(0, block.info.shape[0], num_rows)
    )


def read_weights_with_own_names(
    origin: str,
    reader: TensorReader,
    *,
    prefix: str = "",
    aliases: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> WeightsToImport:
    """Weights under their own names: those that begin with `prefix`, without it.

    Raises CheckpointError if there are none.
    """
    chosen = [name for name in reader.tensors if name.startswith(prefix) and name != prefix]
    if not chosen:
        raise _no_tensor_to_import_error(origin, reader, prefix)
    num_omitted = len(reader.tensors) - len(chosen)
    all_notes = list(notes)
    if num_omitted:
        all_notes.append(
            f"of {len(reader.tensors)} tensors {num_omitted} do not begin with {prefix!r}"
        )
    tensors = []
    for name in sorted(chosen):
        load = partial(reader.load, name)
        tensors.append(RenamedTensorBlock(name.removeprefix(prefix), reader.tensors[name], load))
    tied = {}
    for name, stored in (aliases or {}).items():
        if name.startswith(prefix) and stored in chosen:
            tied[name.removeprefix(prefix)] = stored.removeprefix(prefix)
    return WeightsToImport(origin, tuple(tensors), notes=tuple(all_notes), aliases=tied)


def _no_tensor_to_import_error(origin: str, reader: TensorReader, prefix: str) -> CheckpointError:
    message, why = "there is no tensor in it", None
    if prefix:
        message = f"no tensor's name begins with {prefix!r}"
    if reader.tensors:
        why = f"the first names are {', '.join(list(reader.tensors)[:3])}"
    return CheckpointError(message, where=origin, why=why)


def write_checkpoint_of_imported_weights(
    weights: WeightsToImport,
    out: Path,
    model_toml: str | None,
    *,
    progress: Progress = lambda done, total: None,
    file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Write the directory `out`; its checkpoint is returned.

    Raises UsageError, ResourceError, CheckpointError.
    """
    with create_directory_atomically(out) as directory:
        _write_weights_to_draft(
            weights, directory, file_bytes, lambda done: progress(done, weights.num_bytes)
        )
        for name, path in (weights.files or {}).items():
            copy_file_durably(path, directory / name)
        if model_toml is not None:
            write_bytes_durably(Disk(), directory / MODEL_TOML_FILE_NAME, model_toml.encode())
    return out / "checkpoints" / "step-0"


def _write_weights_to_draft(
    weights: WeightsToImport, directory: Path, file_bytes: int, progress: Callable[[int], None]
) -> None:
    """Write the checkpoint through the store that runs save to, so that it is written, synced and
    committed as any checkpoint."""
    store = open_store_of_run(directory, None)
    draft = store.begin_draft(0)
    pieces: dict[str, list[StoredPiece]] = {}
    files = {}
    done = 0
    for number, group in enumerate(group_tensors_into_files(weights.tensors, file_bytes)):
        file = f"weights-{number:04d}.safetensors"
        sources = []
        for tensor in group:
            parts, info = pieces.setdefault(tensor.name, []), tensor.info
            key = f"{tensor.name}#{len(parts)}"
            offset = tensor.offset or (0,) * len(info.shape)
            done += info.num_bytes
            sources.append(make_safetensors_source(tensor, key, partial(progress, done)))
            parts.append(StoredPiece(file, key, offset, info.shape))
        files[file] = draft.write(file, partial(write_safetensors_stream, sources=sources))
    dtypes = {tensor.name: tensor.info.dtype for tensor in weights.tensors}
    tensors = {}
    for name, parts in pieces.items():
        tensors[name] = StoredTensorPieces(
            _compute_shape_of_stacked_parts(parts), dtypes[name], tuple(parts)
        )
    model_shape = None
    if weights.shape is not None:
        model_shape = _convert_model_shape_to_json(weights.shape)
    facts = {
        "step": 0,
        "imported_from": weights.origin,
        "model_shape": model_shape,
        "hugging_face": dict(weights.settings or {}),
    }
    manifest = Manifest(0, "", {}, facts, tensors, dict(weights.aliases), files)
    store.commit(draft, manifest.to_bytes())


def _compute_shape_of_stacked_parts(parts: Sequence[StoredPiece]) -> tuple[int, ...]:
    """The shape of the tensor that consists of `parts`."""
    ends = [tuple(map(operator.add, part.offset, part.size)) for part in parts]
    return tuple(map(max, zip(*ends, strict=True)))


def _convert_model_shape_to_json(shape: TransformerShape) -> dict[str, Any]:
    """The keys of `shape` that every model has, and those that differ from their defaults."""
    facts = shape.to_json()
    for key in facts.keys() - set(REQUIRED_SHAPE_KEYS):
        if facts[key] == STORED_SHAPE_DEFAULTS[key]:
            del facts[key]
    return facts
