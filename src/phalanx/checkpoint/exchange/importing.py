"""Weights of others as a phalanx checkpoint: OUT looks like a run that has saved once, at step 0,
weights only.

OUT/checkpoints/step-0 is the checkpoint, OUT/model.toml the job file that fits it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.checkpoint.exchange.bags import Bag, StackBag, open_safetensors
from phalanx.checkpoint.exchange.families import family_of
from phalanx.checkpoint.exchange.hf_export import CONFIG, as_source, packed
from phalanx.checkpoint.exchange.new_directory import copy_file, new_directory
from phalanx.checkpoint.exchange.settings import shape_of_config
from phalanx.checkpoint.exchange.translate import Made, apart, to_ours, together
from phalanx.checkpoint.manifest import Manifest, Piece, StoredTensor
from phalanx.checkpoint.reading.mismatch import MisfitError, Wanted, find_misfits
from phalanx.checkpoint.shard_file import write_stream
from phalanx.checkpoint.stores import open_store
from phalanx.core.disk import Disk, write_bytes_durably
from phalanx.core.errors import CheckpointError, LayoutError
from phalanx.core.files import read_json
from phalanx.job.shape import ModelShape
from phalanx.job.tensors import stored_shapes

FILE_BYTES = 4 << 30
MODEL_TOML = "model.toml"
KEPT_SETTINGS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "max_position_embeddings",
    "id2label",
    "label2id",
)
KEPT_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *(
        "generation_config.json",
        "tokenizer.model",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
    ),
)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Weights:
    """What is to be imported. Without a `shape` the tensors have whatever names they came with."""

    origin: str
    tensors: tuple[Made, ...]
    """Those in parts have their parts one after the other."""
    shape: ModelShape | None = None
    settings: Mapping[str, Any] | None = None
    files: Mapping[str, Path] | None = None
    notes: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of tied tensors, and the one under which they are stored."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.described.num_bytes for tensor in self.tensors)


def read_config(source: Path) -> dict[str, Any]:
    """The config.json of a directory. Raises CheckpointError."""
    try:
        config = read_json(source / CONFIG)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "config.json cannot be read", where=str(source / CONFIG), why=str(error)
        ) from None
    if not isinstance(config, dict):
        raise CheckpointError("config.json is not an object", where=str(source / CONFIG))
    return config


def from_hugging_face(source: Path, bag: StackBag | None = None) -> Weights:
    """A directory with config.json; `bag` holds its tensors where they are not in its safetensors
    files.

    Raises LayoutError for a model that phalanx does not have, MisfitError for tensors that are not
    that model's.
    """
    config = read_config(source)
    try:
        shape = shape_of_config(config)
    except LayoutError as error:
        error.where = str(source / CONFIG)
        raise
    family, shapes = family_of(config["model_type"]), stored_shapes(shape)
    theirs = bag or open_safetensors(source)
    found = to_ours(family, shapes, theirs)
    there = {name: made.described for name, made in found.tensors.items()} | found.unknown
    misfits = find_misfits({name: Wanted(size) for name, size in apart(shapes).items()}, there)
    if misfits:
        raise MisfitError(
            f"the weights are not those of the {family.architecture} that config.json describes",
            misfits,
            where=str(source),
        )
    settings = {key: config[key] for key in KEPT_SETTINGS if config.get(key) is not None}
    files = {name: source / name for name in KEPT_FILES if (source / name).is_file()}
    try:
        tensors = tuple(together(shapes, found.tensors))
    except CheckpointError as error:
        error.where = error.where or str(source)
        raise
    notes = tuple(
        f"{name} is left out: the embedding is the head, config.json says"
        for name in found.tied_heads
    )
    return Weights(str(source), tensors, shape, settings, files, notes)


def as_they_are(
    origin: str,
    bag: Bag,
    *,
    prefix: str = "",
    aliases: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Weights:
    """Tensors under their own names: those that begin with `prefix`, without it."""
    chosen = [name for name in bag.tensors if name.startswith(prefix) and name != prefix]
    if not chosen:
        raise CheckpointError(
            f"no tensor's name begins with {prefix!r}" if prefix else "there is no tensor in it",
            where=origin,
            why=f"the first names are {', '.join(list(bag.tensors)[:3])}" if bag.tensors else None,
        )
    left = len(bag.tensors) - len(chosen)
    said = [
        *notes,
        *([f"of {len(bag.tensors)} tensors {left} do not begin with {prefix!r}"] if left else []),
    ]
    tensors = (
        Made(name[len(prefix) :], bag.tensors[name], partial(bag.load, name))
        for name in sorted(chosen)
    )
    tied = {
        name[len(prefix) :]: stored[len(prefix) :]
        for name, stored in (aliases or {}).items()
        if name.startswith(prefix) and stored in chosen
    }
    return Weights(origin, tuple(tensors), notes=tuple(said), aliases=tied)


def write_import(
    weights: Weights,
    out: Path,
    model_toml: str | None,
    *,
    progress: Progress = lambda done, total: None,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Write the directory `out`; its checkpoint is returned.

    Raises UsageError, ResourceError, CheckpointError.
    """
    with new_directory(out) as directory:
        _write_checkpoint(
            weights, directory, file_bytes, lambda done: progress(done, weights.num_bytes)
        )
        for name, path in (weights.files or {}).items():
            copy_file(path, directory / name)
        if model_toml is not None:
            write_bytes_durably(Disk(), directory / MODEL_TOML, model_toml.encode())
    return out / "checkpoints" / "step-0"


def _write_checkpoint(
    weights: Weights, directory: Path, file_bytes: int, progress: Callable[[int], None]
) -> None:
    """Through the store that runs save to, so that it is written, synced and committed as any
    checkpoint."""
    store = open_store(directory, None)
    draft = store.begin(0)
    pieces: dict[str, list[Piece]] = {}
    files = {}
    done = 0
    for number, group in enumerate(packed(weights.tensors, file_bytes)):
        file = f"weights-{number:04d}.safetensors"
        sources = []
        for tensor in group:
            parts, described = pieces.setdefault(tensor.name, []), tensor.described
            key, offset = (
                f"{tensor.name}#{len(parts)}",
                tensor.offset or (0,) * len(described.shape),
            )
            done += described.num_bytes
            sources.append(as_source(tensor, key, partial(progress, done)))
            parts.append(Piece(file, key, offset, described.shape))
        files[file] = draft.write(file, partial(write_stream, sources=sources))
    dtypes = {tensor.name: tensor.described.dtype for tensor in weights.tensors}
    tensors = {
        name: StoredTensor(_shape_of(parts), dtypes[name], tuple(parts))
        for name, parts in pieces.items()
    }
    facts = {
        "step": 0,
        "imported_from": weights.origin,
        "model_shape": _told(weights.shape) if weights.shape else None,
        "hugging_face": dict(weights.settings or {}),
    }
    manifest = Manifest(0, "", {}, facts, tensors, dict(weights.aliases), files)
    store.commit(draft, manifest.to_bytes())


def _shape_of(parts: Sequence[Piece]) -> tuple[int, ...]:
    """Of the tensor that consists of them."""
    ends = [
        [offset + size for offset, size in zip(part.offset, part.size, strict=True)]
        for part in parts
    ]
    return tuple(map(max, zip(*ends, strict=True)))


def _told(shape: ModelShape) -> dict[str, Any]:
    """What is not as in any model."""
    usual = ModelShape(0, 0, 0, 0, 0, 0, 0, False).to_json()
    always = (
        "num_layers",
        "dim",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "ffn_dim",
        "vocab_size",
        "tie_embeddings",
    )
    return {
        key: value for key, value in shape.to_json().items() if key in always or value != usual[key]
    }
