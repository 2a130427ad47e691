"""The manifest of a checkpoint, which describes it: one JSON file, written last.

Torch-free; nothing here is ever executed.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from phalanx.checkpoint.chunks import CHUNK_BYTES, FileSizeAndChecksums
from phalanx.checkpoint.facts import (
    MAX_FACT_INTEGER,
    require_axis_degree,
    require_bounded_text,
    require_json_object,
    require_non_negative_int64,
    require_plausible_progress_count,
    require_valid_facts,
)
from phalanx.checkpoint.folder import (
    STEP_FOLDER_PATTERN,
    CheckpointFolder,
    LocalCheckpointFolder,
    convert_path_to_folder,
)
from phalanx.checkpoint.os_errors import convert_os_error
from phalanx.core.digest import encode_canonical_json
from phalanx.core.errors import CheckpointError
from phalanx.core.files import parse_json

MANIFEST_FORMAT_VERSION = 2
MANIFEST_FILE_NAME = "manifest.json"
# Prefix of names of optimizer state.
OPTIMIZER_TENSOR_PREFIX = "optim/"
# Prefix of names of state of compressed gradients, which belongs to one layout.
COMPRESSION_TENSOR_PREFIX = "comm/"
# numpy's own limit, since 2.0.
MAX_DIMS = 64


@dataclass(frozen=True)
class StoredPiece:
    """One block of a logical tensor: entry `key` of `file`, standing at `offset` in the full
    tensor.

    `xxh3_128` is the digest of its bytes, by which the next save recognizes it; empty if none was
    taken.
    """

    file: str
    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    xxh3_128: str = ""

    def intersect_with_box(
        self, offset: tuple[int, ...], size: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """(start in the full tensor, size) of its overlap with a box of the tensor; None if they do
        not overlap."""
        starts, sizes = [], []
        for piece_start, piece_size, box_start, box_size in zip(
            self.offset, self.size, offset, size, strict=True
        ):
            start = max(piece_start, box_start)
            stop = min(piece_start + piece_size, box_start + box_size)
            if stop <= start:
                return None
            starts.append(start)
            sizes.append(stop - start)
        return tuple(starts), tuple(sizes)


@dataclass(frozen=True)
class StoredTensorPieces:
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    `facts` is the part of a TrainState besides tensors (step, tokens, cursor, seed). `epoch` is the
    number of the job's fencing token: it counts the jobs that have had the run, this one included;
    0 if they are not counted. `collectives`: what the ranks exchanged tensors through ("gloo",
    "nccl", "shared memory"); empty of one rank, and of a checkpoint from before it was written
    down.
    """

    step: int
    job_digest: str
    layout: dict[str, int]
    facts: dict[str, Any]
    tensors: dict[str, StoredTensorPieces]
    aliases: dict[str, str]
    files: dict[str, FileSizeAndChecksums]
    epoch: int = 0
    collectives: str = ""

    def to_json(self) -> dict[str, Any]:
        """The manifest's text as JSON, with its own checksum."""
        body = {"format": MANIFEST_FORMAT_VERSION, "chunk_bytes": CHUNK_BYTES, **asdict(self)}
        return {**body, "xxh3": compute_manifest_checksum(body)}

    def to_bytes(self) -> bytes:
        """The content of the file manifest.json."""
        return encode_canonical_manifest(self.to_json())

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())

    def keep_model_tensors(self) -> Manifest:
        """The manifest of the model alone."""
        return self.drop_tensors_by_prefix(OPTIMIZER_TENSOR_PREFIX, COMPRESSION_TENSOR_PREFIX)

    def drop_tensors_by_prefix(self, *prefixes: str) -> Manifest:
        """The manifest without the tensors whose names begin with one of `prefixes`."""
        tensors = {}
        for name, tensor in self.tensors.items():
            if not name.startswith(prefixes):
                tensors[name] = tensor
        return replace(self, tensors=tensors)


def read_manifest(folder: CheckpointFolder | Path) -> Manifest:
    """Read and check the manifest of one checkpoint.

    Raises CheckpointError naming what is wrong.
    """
    folder = convert_path_to_folder(folder)
    path = folder.where(MANIFEST_FILE_NAME)
    try:
        text = folder.read(MANIFEST_FILE_NAME)
        body = parse_json(text)
        computed_xxh3, canonical = "", b""
        if isinstance(body, dict):
            # Both raise ValueError: for numbers that are none, and for half a letter.
            computed_xxh3, canonical = (
                compute_manifest_checksum(body),
                encode_canonical_manifest(body),
            )
    except FileNotFoundError:
        raise _missing_manifest_error(folder) from None
    except OSError as error:
        raise convert_os_error(error, "the manifest cannot be read", path) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError("the manifest cannot be read", where=path, why=str(error)) from None
    version: Any = type(body).__name__
    if isinstance(body, dict):
        version = body.get("format")
    # Before the checksum, which another format may take otherwise.
    if type(version) is not int or version != MANIFEST_FORMAT_VERSION:
        raise CheckpointError(
            f"format {version!r} is not {MANIFEST_FORMAT_VERSION}",
            where=path,
            fix="use the release that wrote it",
        )
    if body.get("xxh3") != computed_xxh3:
        raise CheckpointError(
            "the manifest is not what was written", where=path, why="its checksum differs"
        )
    # A space more, a key that is there twice: the checksum is of what was parsed.
    if text != canonical:
        raise CheckpointError(
            "the manifest is not what was written", where=path, why="it is written another way"
        )
    try:
        manifest = _parse_manifest(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = repr(error)
        # Our own checks' words; others' texts say too little alone.
        if type(error) is ValueError:
            why = str(error)
        raise CheckpointError("the manifest is damaged", where=path, why=why) from None
    _require_step_of_folder_name(folder, manifest)
    return manifest


def _missing_manifest_error(folder: CheckpointFolder) -> CheckpointError:
    """The error for a folder without a manifest: a directory is renamed into place whole, while an
    object store's folder may be an upload that never ended."""
    if isinstance(folder, LocalCheckpointFolder):
        return CheckpointError(
            "it is damaged", where=folder.url, why=f"{MANIFEST_FILE_NAME} is missing"
        )
    return CheckpointError("incomplete: it was never committed", where=folder.url)


def _require_step_of_folder_name(folder: CheckpointFolder, manifest: Manifest) -> None:
    """Raise CheckpointError if the folder's name or the state is of another step than the manifest.

    Training would continue from a copy under another step's name as from that step.
    """
    if folder.step not in (-1, manifest.step):
        raise CheckpointError(
            f"{folder.name} holds step {manifest.step}",
            where=folder.url,
            fix=(
                "a copy can be removed; a checkpoint that was renamed is called"
                f" step-{manifest.step} again"
            ),
        )
    state_step = manifest.facts.get("step", manifest.step)
    if state_step != manifest.step:
        raise CheckpointError(
            f"the manifest is of step {manifest.step}, and the state in it of step {state_step!r}",
            where=folder.url,
        )


def compute_manifest_checksum(body: Mapping[str, Any]) -> str:
    """XXH3-64 of a manifest's content, whatever its spacing and order."""
    return xxhash.xxh3_64_hexdigest(
        encode_canonical_json({key: body[key] for key in body if key != "xxh3"}).encode()
    )


def encode_canonical_manifest(body: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest in its one canonical form: its content, which has a checksum, decides
    every byte."""
    return (json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def require_valid_aliases(aliases: Mapping[str, Any], tensors: Container[str]) -> dict[str, str]:
    """`aliases` if each leads from a name that no tensor has to a tensor; ValueError if not."""
    for name, stored_as in aliases.items():
        if name in tensors:
            raise ValueError(f"{name!r} is a tensor of its own, and tied to {stored_as!r}")
        if not isinstance(stored_as, str) or stored_as not in tensors:
            raise ValueError(f"{name!r} is tied to {stored_as!r}, which is no tensor")
    return dict(aliases)


def _parse_manifest(body: Mapping[str, Any]) -> Manifest:
    tensors = {}
    for name, facts in require_json_object(body["tensors"]).items():
        tensors[name] = _parse_stored_tensor(facts)
    # Files are verified by chunks of this size alone.
    if require_non_negative_int64(body["chunk_bytes"]) != CHUNK_BYTES:
        raise ValueError(f"chunks of {body['chunk_bytes']} bytes")
    files = {}
    for name, facts in require_json_object(body["files"]).items():
        files[_require_plain_file_name(name)] = _parse_stored_file(name, facts)
    for name, tensor in tensors.items():
        _require_valid_stored_tensor(name, tensor, files)
    layout = {}
    for axis, number in require_json_object(body["layout"]).items():
        layout[axis] = require_axis_degree(number)
    return Manifest(
        require_plausible_progress_count(body["step"]),
        require_bounded_text(body["job_digest"]),
        layout,
        require_valid_facts(body["facts"]),
        tensors,
        require_valid_aliases(require_json_object(body["aliases"]), tensors),
        files,
        require_non_negative_int64(body.get("epoch", 0)),
        require_bounded_text(body.get("collectives", "")),
    )


def _parse_stored_tensor(facts: Mapping[str, Any]) -> StoredTensorPieces:
    shape, dtype = (
        tuple(map(require_non_negative_int64, facts["shape"])),
        require_bounded_text(facts["dtype"]),
    )
    return StoredTensorPieces(shape, dtype, tuple(map(_parse_stored_piece, facts["pieces"])))


def _parse_stored_piece(facts: Mapping[str, Any]) -> StoredPiece:
    return StoredPiece(
        _require_plain_file_name(facts["file"]),
        require_bounded_text(facts["key"]),
        tuple(map(require_non_negative_int64, facts["offset"])),
        tuple(map(require_non_negative_int64, facts["size"])),
        require_bounded_text(facts.get("xxh3_128", "")),
    )


def _require_valid_stored_tensor(
    name: str, tensor: StoredTensorPieces, files: Container[str]
) -> None:
    """Raise ValueError if no tensor can be of this shape, or a piece lies outside of it or in a
    file that is not one of `files`."""
    num_dims, num_elements = len(tensor.shape), math.prod(tensor.shape)
    if num_dims > MAX_DIMS or num_elements > MAX_FACT_INTEGER:
        raise ValueError(f"{name} is of {num_dims} dimensions and {num_elements} elements")
    for piece in tensor.pieces:
        if piece.file not in files:
            raise ValueError(f"{name} is in {piece.file}, which is not listed")
        # Strict: a piece with another number of dimensions is a ValueError, too.
        for offset, size, length in zip(piece.offset, piece.size, tensor.shape, strict=True):
            if not 0 <= offset <= offset + size <= length:
                raise ValueError(f"{name} has a piece outside its shape {list(tensor.shape)}")


def _parse_stored_file(name: str, facts: Mapping[str, Any]) -> FileSizeAndChecksums:
    stored = FileSizeAndChecksums(
        require_non_negative_int64(facts["num_bytes"]), str(facts["chunks_xxh3"])
    )
    if (
        not re.fullmatch(r"([0-9a-f]{16})*", stored.chunks_xxh3)
        or len(stored.chunks_xxh3) != 16 * stored.num_chunks
    ):
        raise ValueError(
            f"{name} has {len(stored.chunks_xxh3)} digits of checksums for {stored.num_bytes} bytes"
        )
    return stored


def _require_plain_file_name(name: Any) -> str:
    """A plain file name: a manifest cannot point outside its directory."""
    if (
        not isinstance(name, str)
        or not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", name)
        or name.startswith(".")
    ):
        raise ValueError(f"bad file name {name!r}")
    return name


def build_checkpoint_path(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step}"


def list_checkpoint_paths_of_run(run_dir: Path) -> list[Path]:
    """Checkpoints under a run's own directory, oldest first.

    Uncommitted directories have other names.
    """
    return list_checkpoint_paths_in(run_dir / "checkpoints")


def list_checkpoint_paths_in(root: Path) -> list[Path]:
    """Checkpoints in a directory, oldest first; none if it is not there.

    A `step-N` was renamed into place as a whole, so that one without a manifest is damaged, and not
    unfinished: also a file, a pipe or a link of that name. Every verb takes these for the
    checkpoints of a run. Raises CheckpointError if the directory cannot be listed: that is not the
    same as empty.
    """
    by_step = []
    try:
        for name in os.listdir(root):
            match = STEP_FOLDER_PATTERN.fullmatch(name)
            if match and _path_or_link_exists(root / name):
                by_step.append((int(match[1]), root / name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise convert_os_error(
            error, "checkpoints cannot be looked for", str(error.filename or root)
        ) from None
    # By number: by name step-10 would come before step-9.
    return [entry for _, entry in sorted(by_step)]


def _path_or_link_exists(path: Path) -> bool:
    """True if there is anything at `path`, also a link that leads to nothing.

    Raises OSError unless that is known.
    """
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True
