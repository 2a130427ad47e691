"""Verifies that a checkpoint is exactly as it was written: every byte of every file in its
directory.

Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpoint.folder import Folder, as_folder
from phalanx.checkpoint.manifest import (
    MANIFEST_FILE_NAME,
    Manifest,
    Piece,
    StoredTensor,
    read_manifest,
)
from phalanx.checkpoint.os_errors import wrap_os_error
from phalanx.checkpoint.shard_file import SAFETENSORS_DTYPES, CheckedFile
from phalanx.core.errors import CheckpointError

Progress = Callable[[int], None]


@dataclass(frozen=True)
class CheckpointVerification:
    """The result of verifying the checkpoint at `url`: it is intact if `problems` is empty."""

    url: str
    num_bytes: int
    problems: tuple[CheckpointError, ...]

    @property
    def is_intact(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """An object of `phalanx checkpoint verify --json`."""
        problems = [str(problem) for problem in self.problems]
        return {
            "path": self.url,
            "num_bytes": self.num_bytes,
            "ok": self.is_intact,
            "problems": problems,
        }


def verify_folder(
    folder: Folder, on_progress: Callable[[int, int], None]
) -> CheckpointVerification:
    """Verify a checkpoint; `on_progress(done, total)` is called with bytes as they are read."""
    try:
        total = sum(folder.sizes().values())
    except OSError:
        # Verification reports it.
        total = 0
    done = 0

    def add(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        on_progress(done, total)

    return CheckpointVerification(folder.url, total, tuple(find_checkpoint_problems(folder, add)))


def find_checkpoint_problems(
    folder: Folder | Path, progress: Progress = lambda num_bytes: None
) -> list[CheckpointError]:
    """All problems of a checkpoint; empty if it can be trusted.

    `progress` is called with the number of bytes as they are read. Stops at the first bad chunk of
    a file and goes on with the next file.
    """
    folder = as_folder(folder)
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [error]
    problems = [*_directory_problems(folder, manifest), *_tensor_problems(folder, manifest)]
    present = _list_files(folder)
    for name, stored in sorted(manifest.files.items()):
        if name not in present:
            # Reported as missing by `_directory_problems`.
            continue
        try:
            with CheckedFile(folder, name, stored) as file:
                done = 0
                for num_bytes in file.verify():
                    progress(num_bytes - done)
                    done = num_bytes
                _require_pieces_in_header(file, name, manifest)
        except CheckpointError as error:
            problems.append(error)
    return problems


def _list_files(folder: Folder) -> set[str]:
    try:
        return set(folder.sizes())
    except OSError:
        return set()


def require_complete_directory(folder: Folder | Path, manifest: Manifest) -> None:
    """Raise CheckpointError unless the folder holds the manifest's files and nothing else."""
    for problem in _directory_problems(as_folder(folder), manifest):
        raise problem


def require_complete_structure(folder: Folder | Path, manifest: Manifest) -> None:
    """Raise CheckpointError for all that `find_checkpoint_problems` finds without reading the
    tensors' bytes."""
    folder = as_folder(folder)
    for problem in (*_directory_problems(folder, manifest), *_tensor_problems(folder, manifest)):
        raise problem
    for name, stored in sorted(manifest.files.items()):
        with CheckedFile(folder, name, stored) as file:
            _require_pieces_in_header(file, name, manifest)


def _directory_problems(folder: Folder, manifest: Manifest) -> list[CheckpointError]:
    """The files that are missing, and those that the manifest does not list."""
    try:
        present = set(folder.sizes())
    except OSError as error:
        return [wrap_os_error(error, "it cannot be read", folder.url)]
    missing = sorted(set(manifest.files) - present)
    extra = sorted(present - set(manifest.files) - {MANIFEST_FILE_NAME})
    problems = []
    if missing:
        message = f"{_join_file_names(missing)} missing"
        why = f"{missing[0]} holds {_join_tensor_names(_tensors_in_file(manifest, missing[0]))}"
        problems.append(CheckpointError(message, where=folder.url, why=why))
    if extra:
        message, fix = f"{_join_file_names(extra)} in it that no save wrote", "move it elsewhere"
        problems.append(CheckpointError(message, where=folder.url, fix=fix))
    return problems


def _tensors_in_file(manifest: Manifest, file: str) -> list[str]:
    """The names of the tensors that have a piece in `file`."""
    names = []
    for name, tensor in manifest.tensors.items():
        if any(piece.file == file for piece in tensor.pieces):
            names.append(name)
    return names


def _tensor_problems(folder: Folder, manifest: Manifest) -> Iterator[CheckpointError]:
    """Problems of tensors: their pieces must make them, each element once."""
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in SAFETENSORS_DTYPES:
            yield CheckpointError(
                f"{name} is of type {tensor.dtype}, which no release writes", where=folder.url
            )
        elif not is_tiled_by_pieces(tensor):
            yield CheckpointError(
                f"the pieces of {name} do not make {list(tensor.shape)}", where=folder.url
            )


def is_tiled_by_pieces(tensor: StoredTensor) -> bool:
    """True if the pieces make the full tensor: each element once."""
    # As many elements as the tensor has, and none twice: then none is missing either.
    volume = sum(math.prod(piece.size) for piece in tensor.pieces)
    if volume != math.prod(tensor.shape):
        return False
    # Blocks without elements overlap nothing.
    pieces = [piece for piece in tensor.pieces if math.prod(piece.size)]
    # In order, so that only neighbours are compared: a tensor may have thousands of pieces.
    pieces.sort(key=lambda piece: piece.offset)
    for number, piece in enumerate(pieces):
        if any(_is_overlapping(piece, other) for other in _find_overlap_candidates(pieces, number)):
            return False
    return True


def _find_overlap_candidates(pieces: list[Piece], number: int) -> list[Piece]:
    """The pieces after piece `number` that begin before it ends along the first dimension."""
    piece = pieces[number]
    if not piece.size:
        return pieces[number + 1 :]
    end = piece.offset[0] + piece.size[0]
    neighbours = []
    for other in pieces[number + 1 :]:
        if other.offset[0] >= end:
            break
        neighbours.append(other)
    return neighbours


def _is_overlapping(a: Piece, b: Piece) -> bool:
    return a.overlap(b.offset, b.size) is not None


def _require_pieces_in_header(file: CheckedFile, name: str, manifest: Manifest) -> None:
    """Raise CheckpointError if the file's own header contradicts the manifest."""
    for tensor_name, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            if piece.file != name:
                continue
            entry = file.entries.get(piece.key)
            expected = (piece.size, SAFETENSORS_DTYPES.get(tensor.dtype, ("", 0))[0])
            if entry is None or (entry.shape, entry.dtype) != expected:
                raise CheckpointError(
                    f"{piece.key} is not the block of {tensor_name} that the manifest says",
                    where=file.where,
                )


def _join_file_names(names: list[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is"
    return f"{', '.join(names)} ({len(names)} files) are"


def _join_tensor_names(names: list[str]) -> str:
    text = ", ".join(names[:3])
    if len(names) > 3:
        text += f" and {len(names) - 3} more tensors"
    return text
