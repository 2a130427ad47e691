"""Load logical tensors from a checkpoint of any layout: a rank reads what it needs, all ranks
agree on the outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from phalanx.checkpoint.all_ranks import Group, agreed
from phalanx.checkpoint.folder import Folder, as_folder
from phalanx.checkpoint.manifest import Manifest, Piece, read_manifest
from phalanx.checkpoint.reading.mismatch import Misfit, MisfitError, Wanted, find_misfits
from phalanx.checkpoint.reading.verify import is_tiled, require_whole_directory
from phalanx.checkpoint.shard_file import DTYPES, CheckedFile, Entry
from phalanx.core.errors import CheckpointError
from phalanx.core.phases import Phases
from phalanx.mesh.logical import Box, LogicalShard


def load(
    place: Folder | Path,
    shards: Mapping[str, LogicalShard],
    *,
    group: Group,
    phases: Phases,
    require: Callable[[Manifest], Manifest | None] = lambda manifest: None,
    cast: bool = False,
    weights_only: bool = False,
) -> Manifest:
    """Fill `shards` from a checkpoint of any layout. Collective.

    Names, shapes, types and checksums are checked and every block is read into staging on all ranks
    before any tensor changes; `require` may refuse the checkpoint by what its manifest says, or
    return the part of it that is to be loaded. `cast` takes numbers of another type as they come,
    `weights_only` leaves the optimizer's state in the checkpoint alone. Raises CheckpointError on
    every rank if any rank finds something wrong.
    """
    folder = as_folder(place)
    with phases("ckpt_load"):
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        manifests: list[Manifest] = []
        with agreed(group, folder.url, "loading a checkpoint") as outcome:
            manifest = read_manifest(folder)
            require_whole_directory(folder, manifest)
            manifest = require(manifest) or manifest
            manifest = manifest.without_optimizer() if weights_only else manifest
            outcome["mine"] = [asdict(misfit) for misfit in _misfits(manifest, shards, cast)]
            manifests.append(manifest)
        _require_no_misfit(folder, outcome["all"], weights_only)
        with agreed(group, folder.url, "loading a checkpoint"):
            staged = stage_blocks(folder, manifests[0], shards)
        with torch.no_grad():
            for target, source in staged:
                target.copy_(source)
        return manifests[0]


def require_fit(
    folder: Folder, manifest: Manifest, shards: Mapping[str, LogicalShard], *, cast: bool = False
) -> None:
    """Raise MisfitError unless the checkpoint holds just these tensors, of these shapes and,
    without `cast`, types."""
    if misfits := _misfits(manifest, shards, cast):
        raise _misfit_error(folder, misfits, "cast=True rounds them")


def _misfits(
    manifest: Manifest, shards: Mapping[str, LogicalShard], cast: bool
) -> tuple[Misfit, ...]:
    wanted = {name: Wanted(shard.global_shape, shard.dtype) for name, shard in shards.items()}
    return find_misfits(wanted, manifest.tensors, cast=cast)


def _require_no_misfit(
    folder: Folder, by_rank: list[list[dict[str, str]]], weights_only: bool
) -> None:
    """A tensor that some rank wants is not extra: stages of a pipeline want different ones."""
    by_rank_rows = [{Misfit(**row) for row in told} for told in by_rank]
    extra = set.intersection(
        *({row for row in rows if row.kind == "extra"} for rows in by_rank_rows)
    )
    others = {row for rows in by_rank_rows for row in rows if row.kind != "extra"}
    if extra or others:
        rows = tuple(sorted(extra | others, key=lambda row: (row.kind, row.name)))
        raise _misfit_error(
            folder, rows, "model.init_cast=true rounds them" if weights_only else ""
        )


def _misfit_error(folder: Folder, misfits: tuple[Misfit, ...], cast_fix: str) -> MisfitError:
    only_types = all(misfit.kind == "dtype" for misfit in misfits)
    fix = cast_fix if only_types and cast_fix else "use the job it was written by"
    return MisfitError("the checkpoint does not fit this model", misfits, where=folder.url, fix=fix)


def stage_blocks(
    folder: Folder, manifest: Manifest, shards: Mapping[str, LogicalShard]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(target view, staged source) for each overlap of a wanted box with a stored piece.

    Only the chunks that hold wanted bytes are read; each is verified in memory before anything is
    taken from it. The source has the type it was stored in.
    """
    staged = []
    for file, reads in sorted(_wanted(folder, manifest, shards).items()):
        with CheckedFile(folder, file, manifest.files[file]) as source:
            reads.sort(
                key=lambda read: (
                    source.entries[read[0].key].start if read[0].key in source.entries else -1
                )
            )
            for piece, shard, box in reads:
                dtype = manifest.tensors[shard.name].dtype
                entry = _entry(source, piece, dtype)
                start, size = piece.overlap(box.global_offset, box.size) or ((), ())
                inside = tuple(s - o for s, o in zip(start, piece.offset, strict=True))
                block = torch.from_numpy(source.read_block(entry, inside, size))
                target = shard.tensor[
                    tuple(
                        slice(s - g + o, s - g + o + n)
                        for s, g, o, n in zip(
                            start, box.global_offset, box.local_offset, size, strict=True
                        )
                    )
                ]
                staged.append((target, block.view(getattr(torch, dtype)).reshape(size)))
    for name in shards:
        if not is_tiled(
            manifest.tensors[name]
        ):  # a piece that is there twice hides one that is not
            raise CheckpointError(f"{name} is not whole in the checkpoint", where=folder.url)
    return staged


def _wanted(
    folder: Folder, manifest: Manifest, shards: Mapping[str, LogicalShard]
) -> dict[str, list[tuple[Piece, LogicalShard, Box]]]:
    """By file: which pieces this rank's boxes overlap.

    CheckpointError if they do not cover a box.
    """
    wanted: dict[str, list[tuple[Piece, LogicalShard, Box]]] = {}
    for name, shard in shards.items():
        for box in shard.boxes:
            covered = 0
            for piece in manifest.tensors[name].pieces:
                if overlap := piece.overlap(box.global_offset, box.size):
                    covered += math.prod(overlap[1])
                    wanted.setdefault(piece.file, []).append((piece, shard, box))
            if covered != math.prod(box.size):
                raise CheckpointError(f"{name} is not whole in the checkpoint", where=folder.url)
    return wanted


def _entry(source: CheckedFile, piece: Piece, dtype: str) -> Entry:
    """The file's own header must say what the manifest says, else a copy would cast or broadcast
    in silence."""
    entry = source.entries.get(piece.key)
    if entry is None:
        raise CheckpointError(f"there is no {piece.key} in it", where=source.where)
    if (entry.shape, entry.dtype) != (piece.size, DTYPES.get(dtype, ("", 0))[0]):
        raise CheckpointError(
            f"{piece.key} is {entry.dtype} {list(entry.shape)} in it, not {dtype}"
            f" {list(piece.size)}",
            where=source.where,
        )
    return entry
