"""Load logical tensors from a checkpoint of any layout: a rank reads what it needs, all ranks
agree on the outcome."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from phalanx.checkpoint.all_ranks import CollectiveGroup, run_on_all_ranks_or_raise
from phalanx.checkpoint.folder import CheckpointFolder, convert_path_to_folder
from phalanx.checkpoint.manifest import Manifest, StoredPiece, read_manifest
from phalanx.checkpoint.reading.full_tensors import build_box_slices, subtract_offsets
from phalanx.checkpoint.reading.mismatch import (
    ExpectedShapeAndDtype,
    MismatchError,
    TensorMismatch,
    find_tensor_mismatches,
)
from phalanx.checkpoint.reading.verify import is_tiled_by_pieces, require_files_of_manifest
from phalanx.checkpoint.shard_file import (
    SAFETENSORS_DTYPE_OF_TORCH_DTYPE,
    SafetensorsHeaderEntry,
    VerifiedSafetensorsFile,
)
from phalanx.core.errors import CheckpointError
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.logical import Box, LogicalShard


def load_checkpoint_into_shards(
    folder: CheckpointFolder | Path,
    shards: Mapping[str, LogicalShard],
    *,
    group: CollectiveGroup,
    phases: PhaseTimer,
    require: Callable[[Manifest], Manifest | None] = lambda manifest: None,
    cast: bool = False,
    weights_only: bool = False,
) -> Manifest:
    """Fill `shards` from a checkpoint of any layout. Collective.

    Names, shapes, types and checksums are checked and every block is read into staging on all ranks
    before any tensor changes; `require` may refuse the checkpoint by its manifest, or return the
    part of it that is to be loaded. `cast` takes numbers of another type as they come,
    `weights_only` leaves the optimizer's state in the checkpoint alone. Raises CheckpointError on
    every rank if any rank finds something wrong.
    """
    folder = convert_path_to_folder(folder)
    with phases("ckpt_load"):
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        manifests: list[Manifest] = []
        with run_on_all_ranks_or_raise(group, folder.url, "loading a checkpoint") as results:
            manifest = read_manifest(folder)
            require_files_of_manifest(folder, manifest)
            # Inside: what it refuses on one rank is raised on all.
            manifest = require(manifest) or manifest
            if weights_only:
                manifest = manifest.keep_model_tensors()
            mismatches = _find_shard_mismatches(manifest, shards, cast)
            results.local = [asdict(mismatch) for mismatch in mismatches]
            manifests.append(manifest)
        _require_no_mismatch(folder, results.by_rank, weights_only)
        with run_on_all_ranks_or_raise(group, folder.url, "loading a checkpoint"):
            # Host memory for this rank's part of the state, until all ranks have theirs.
            staged = read_overlapping_blocks(folder, manifests[0], shards)
        # Only now that no rank can fail any more: a state is loaded as a whole, or not at all.
        with torch.no_grad():
            for target, source in staged:
                target.copy_(source)
        return manifests[0]


def require_checkpoint_of_same_tensors(
    folder: CheckpointFolder,
    manifest: Manifest,
    shards: Mapping[str, LogicalShard],
    *,
    cast: bool = False,
) -> None:
    """Raise MismatchError unless the checkpoint holds just these tensors, of these shapes and,
    without `cast`, types."""
    if mismatches := _find_shard_mismatches(manifest, shards, cast):
        raise _build_mismatch_error(folder, mismatches, "cast=True rounds them")


def _find_shard_mismatches(
    manifest: Manifest, shards: Mapping[str, LogicalShard], cast: bool
) -> tuple[TensorMismatch, ...]:
    expected = {
        name: ExpectedShapeAndDtype(shard.global_shape, shard.dtype)
        for name, shard in shards.items()
    }
    return find_tensor_mismatches(expected, manifest.tensors, cast=cast)


def _require_no_mismatch(
    folder: CheckpointFolder, by_rank: list[list[dict[str, str]]], weights_only: bool
) -> None:
    """Raise MismatchError for the mismatches of all ranks.

    A tensor that some rank expects is not extra: stages of a pipeline expect different ones.
    """
    extra: set[TensorMismatch] | None = None
    mismatches: set[TensorMismatch] = set()
    for rows in by_rank:
        of_rank = {TensorMismatch(**row) for row in rows}
        extra_of_rank = {mismatch for mismatch in of_rank if mismatch.kind == "extra"}
        if extra is None:
            extra = extra_of_rank
        # Extra is what no rank expects.
        extra &= extra_of_rank
        mismatches |= of_rank - extra_of_rank
    mismatches |= extra or set()
    if mismatches:
        ordered = tuple(sorted(mismatches, key=lambda mismatch: (mismatch.kind, mismatch.name)))
        cast_fix = ""
        if weights_only:
            cast_fix = "model.init_cast=true rounds them"
        raise _build_mismatch_error(folder, ordered, cast_fix)


def _build_mismatch_error(
    folder: CheckpointFolder, mismatches: tuple[TensorMismatch, ...], cast_fix: str
) -> MismatchError:
    fix = "use the job it was written by"
    if cast_fix and all(mismatch.kind == "dtype" for mismatch in mismatches):
        fix = cast_fix
    message = "the checkpoint does not fit this model"
    return MismatchError(message, mismatches, where=folder.url, fix=fix)


def read_overlapping_blocks(
    folder: CheckpointFolder, manifest: Manifest, shards: Mapping[str, LogicalShard]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(target view, staged source) for each overlap of a box of `shards` with a stored piece.

    Only the chunks that hold these bytes are read; each is verified in memory before anything is
    taken from it. The source has the type it was stored in. Raises CheckpointError.
    """
    staged = []
    for file, reads in sorted(_list_pieces_to_read_by_file(folder, manifest, shards).items()):
        with VerifiedSafetensorsFile(folder, file, manifest.files[file]) as source:
            starts = {key: entry.start for key, entry in source.entries.items()}
            # In the file's order: a chunk is read and verified once for all blocks that lie in it.
            reads.sort(key=lambda read: starts.get(read[0].key, -1))
            for piece, shard, box in reads:
                dtype = manifest.tensors[shard.name].dtype
                entry = _find_header_entry_of_piece(source, piece, dtype)
                start, size = piece.intersect_with_box(box.global_offset, box.size) or ((), ())
                in_piece = subtract_offsets(start, piece.offset)
                block = torch.from_numpy(source.read_box_of_entry(entry, in_piece, size))
                target = shard.tensor[_slice_local_tensor(box, start, size)]
                staged.append((target, block.view(getattr(torch, dtype)).reshape(size)))
    for name in shards:
        # A piece that is stored twice hides one that is not there: covered elements alone do not
        # tell.
        if not is_tiled_by_pieces(manifest.tensors[name]):
            raise CheckpointError(f"{name} is not whole in the checkpoint", where=folder.url)
    return staged


def _slice_local_tensor(
    box: Box, start: tuple[int, ...], size: tuple[int, ...]
) -> tuple[slice, ...]:
    """Slices of the local tensor for the elements [start, start + size) of the full tensor, which
    lie in `box`."""
    in_box = subtract_offsets(start, box.global_offset)
    local_start = tuple(map(operator.add, in_box, box.local_offset))
    return build_box_slices(local_start, size)


def _list_pieces_to_read_by_file(
    folder: CheckpointFolder, manifest: Manifest, shards: Mapping[str, LogicalShard]
) -> dict[str, list[tuple[StoredPiece, LogicalShard, Box]]]:
    """The pieces that this rank's boxes overlap, by file.

    Raises CheckpointError if they do not cover a box.
    """
    reads: dict[str, list[tuple[StoredPiece, LogicalShard, Box]]] = {}
    for name, shard in shards.items():
        for box in shard.boxes:
            num_covered = 0
            for piece in manifest.tensors[name].pieces:
                if overlap := piece.intersect_with_box(box.global_offset, box.size):
                    num_covered += math.prod(overlap[1])
                    reads.setdefault(piece.file, []).append((piece, shard, box))
            if num_covered != math.prod(box.size):
                raise CheckpointError(f"{name} is not whole in the checkpoint", where=folder.url)
    return reads


def _find_header_entry_of_piece(
    source: VerifiedSafetensorsFile, piece: StoredPiece, dtype: str
) -> SafetensorsHeaderEntry:
    """The entry of `piece` in the file's own header.

    Raises CheckpointError if it contradicts the manifest: a copy would cast or broadcast in
    silence.
    """
    entry = source.entries.get(piece.key)
    if entry is None:
        raise CheckpointError(f"there is no {piece.key} in it", where=source.where)
    if (entry.shape, entry.dtype) != (
        piece.size,
        SAFETENSORS_DTYPE_OF_TORCH_DTYPE.get(dtype, ("", 0))[0],
    ):
        raise CheckpointError(
            f"{piece.key} is {entry.dtype} {list(entry.shape)} in it, not {dtype}"
            f" {list(piece.size)}",
            where=source.where,
        )
    return entry
