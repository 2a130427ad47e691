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

from phalanx.checkpoint.folder import CheckpointFolder, convert_path_to_folder
from phalanx.checkpoint.manifest import (
    MANIFEST_FILE_NAME,
    Manifest,
    StoredPiece,
    StoredTensorPieces,
    read_manifest,
)
from phalanx.checkpoint.os_errors import convert_os_error
from phalanx.checkpoint.shard_file import SAFETENSORS_DTYPE_OF_TORCH_DTYPE, VerifiedSafetensorsFile
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


def verify_checkpoint_folder(
    folder: CheckpointFolder, on_progress: Callable[[int, int], None]
) -> CheckpointVerification:
    """Verify a checkpoint; `on_progress(done, total)` is called with bytes as they are read."""
    try:
        total = sum(folder.file_sizes().values())
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
    folder: CheckpointFolder | Path, progress: Progress = lambda num_bytes: None
) -> list[CheckpointError]:
    """All problems of a checkpoint; empty if it can be trusted.

    `progress` is called with the number of bytes as they are read. Stops at the first bad chunk of
    a file and goes on with the next file.
    """
    folder = convert_path_to_folder(folder)
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [error]
    problems = [
        *_find_missing_and_extra_files(folder, manifest),
        *_find_incomplete_tensors(folder, manifest),
    ]
    present = _list_manifest_files(folder)
    for name, stored in sorted(manifest.files.items()):
        if name not in present:
            # Reported as missing by `_find_missing_and_extra_files`.
            continue
        try:
            with VerifiedSafetensorsFile(folder, name, stored) as file:
                done = 0
                for num_bytes in file.verify_chunks():
                    progress(num_bytes - done)
                    done = num_bytes
                _require_header_agrees_with_manifest(file, name, manifest)
        except CheckpointError as error:
            problems.append(error)
    return problems


def _list_manifest_files(folder: CheckpointFolder) -> set[str]:
    try:
        return set(folder.file_sizes())
    except OSError:
        return set()


def require_files_of_manifest(folder: CheckpointFolder | Path, manifest: Manifest) -> None:
    """Raise CheckpointError unless the folder holds the manifest's files and nothing else."""
    for problem in _find_missing_and_extra_files(convert_path_to_folder(folder), manifest):
        raise problem


def require_valid_structure_without_data(
    folder: CheckpointFolder | Path, manifest: Manifest
) -> None:
    """Raise CheckpointError for all that `find_checkpoint_problems` finds without reading the
    tensors' bytes."""
    folder = convert_path_to_folder(folder)
    for problem in (
        *_find_missing_and_extra_files(folder, manifest),
        *_find_incomplete_tensors(folder, manifest),
    ):
        raise problem
    for name, stored in sorted(manifest.files.items()):
        with VerifiedSafetensorsFile(folder, name, stored) as file:
            _require_header_agrees_with_manifest(file, name, manifest)


def _find_missing_and_extra_files(
    folder: CheckpointFolder, manifest: Manifest
) -> list[CheckpointError]:
    """The files that are missing, and those that the manifest does not list."""
    try:
        present = set(folder.file_sizes())
    except OSError as error:
        return [convert_os_error(error, "it cannot be read", folder.url)]
    missing = sorted(set(manifest.files) - present)
    extra = sorted(present - set(manifest.files) - {MANIFEST_FILE_NAME})
    problems = []
    if missing:
        message = f"{_format_file_names(missing)} missing"
        lost_tensors = _list_tensors_in_file(manifest, missing[0])
        why = f"{missing[0]} holds {_format_tensor_names(lost_tensors)}"
        problems.append(CheckpointError(message, where=folder.url, why=why))
    if extra:
        message, fix = f"{_format_file_names(extra)} in it that no save wrote", "move it elsewhere"
        problems.append(CheckpointError(message, where=folder.url, fix=fix))
    return problems


def _list_tensors_in_file(manifest: Manifest, file: str) -> list[str]:
    """The names of the tensors that have a piece in `file`."""
    names = []
    for name, tensor in manifest.tensors.items():
        if any(piece.file == file for piece in tensor.pieces):
            names.append(name)
    return names


def _find_incomplete_tensors(
    folder: CheckpointFolder, manifest: Manifest
) -> Iterator[CheckpointError]:
    """Problems of tensors: their pieces must make them, each element once."""
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in SAFETENSORS_DTYPE_OF_TORCH_DTYPE:
            yield CheckpointError(
                f"{name} is of type {tensor.dtype}, which no release writes", where=folder.url
            )
        elif not is_tiled_by_pieces(tensor):
            yield CheckpointError(
                f"the pieces of {name} do not make {list(tensor.shape)}", where=folder.url
            )


def is_tiled_by_pieces(tensor: StoredTensorPieces) -> bool:
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
        if any(
            _do_pieces_overlap(piece, other)
            for other in _list_pieces_that_may_overlap(pieces, number)
        ):
            return False
    return True


def _list_pieces_that_may_overlap(pieces: list[StoredPiece], number: int) -> list[StoredPiece]:
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


def _do_pieces_overlap(a: StoredPiece, b: StoredPiece) -> bool:
    return a.intersect_with_box(b.offset, b.size) is not None


def _require_header_agrees_with_manifest(
    file: VerifiedSafetensorsFile, name: str, manifest: Manifest
) -> None:
    """Raise CheckpointError if the file's own header contradicts the manifest."""
    for tensor_name, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            if piece.file != name:
                continue
            entry = file.entries.get(piece.key)
            expected = (piece.size, SAFETENSORS_DTYPE_OF_TORCH_DTYPE.get(tensor.dtype, ("", 0))[0])
            if entry is None or (entry.shape, entry.dtype) != expected:
                raise CheckpointError(
                    f"{piece.key} is not the block of {tensor_name} that the manifest says",
                    where=file.where,
                )


def _format_file_names(names: list[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is"
    return f"{', '.join(names)} ({len(names)} files) are"


def _format_tensor_names(names: list[str]) -> str:
    text = ", ".join(names[:3])
    if len(names) > 3:
        text += f" and {len(names) - 3} more tensors"
    return text
