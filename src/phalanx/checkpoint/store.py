"""Save and load logical tensors: every rank writes and reads only its own blocks, all ranks agree on the outcome."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phalanx.checkpoint.chunks import StoredFile
from phalanx.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    Piece,
    StoredTensor,
    checkpoint_directory,
    read_manifest,
)
from phalanx.checkpoint.retention import REMOVED
from phalanx.checkpoint.shard_file import DTYPES, Bytes, CheckedFile, Entry, Source, write_file
from phalanx.checkpoint.verify import require_whole_directory
from phalanx.core.errors import CheckpointError
from phalanx.core.files import fsync_directory, write_json_atomic
from phalanx.core.phases import Phases
from phalanx.mesh.logical import Box, LogicalShard
from phalanx.mesh.mesh import Mesh


def save(
    run_dir: Path,
    step: int,
    shards: Mapping[str, LogicalShard],
    *,
    aliases: Mapping[str, str],
    facts: Mapping[str, Any],
    job_digest: str,
    mesh: Mesh,
    phases: Phases,
    before_commit: Callable[[], None] = lambda: None,
) -> tuple[Path, int]:
    """Write RUN/checkpoints/step-N. Returns (directory, bytes). Collective.

    `before_commit` is called when every rank's part is written, before there is a checkpoint.

    Files are written and synced in a hidden directory, the manifest last; one rename makes it a checkpoint. If any
    rank fails, every rank raises CheckpointError and nothing is left but the checkpoints that were there before.
    """
    final = checkpoint_directory(run_dir, step)
    unfinished = final.with_name(f".{final.name}.partial")
    with phases("ckpt_stage"):
        with _agreed(mesh, final, "preparing a checkpoint"):
            if mesh.rank == 0:
                clean_up(run_dir)
                unfinished.mkdir(parents=True)
    try:
        with phases("ckpt_write"):
            with _agreed(mesh, final, "writing a checkpoint") as outcome:
                outcome["mine"] = _write_mine(unfinished, shards, mesh.rank)
            written = outcome["all"]
        manifest = _assemble(step, job_digest, mesh, facts, aliases, shards, written)
        before_commit()
        with phases("before_commit"):
            with _agreed(mesh, final, "committing a checkpoint"):
                if mesh.rank == 0:
                    _commit(unfinished, final, manifest)
    except CheckpointError:
        if mesh.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    with phases("after_commit"):
        return final, manifest.num_bytes


def clean_up(run_dir: Path) -> None:
    """What a killed save left: half-written directories go, a checkpoint caught while it was replaced comes back.

    For the one process that holds the run directory's lock.
    """
    for ending in (".partial", REMOVED):
        for left in (run_dir / "checkpoints").glob(f".step-*{ending}"):
            shutil.rmtree(left, ignore_errors=True)
    for left in (run_dir / "checkpoints").glob(".step-*.replaced"):
        whole = left.with_name(left.name.removeprefix(".").removesuffix(".replaced"))
        if not whole.exists():
            os.rename(left, whole)
        else:
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _agreed(mesh: Mesh, where: Path, doing: str) -> Iterator[dict[str, Any]]:
    """Run the body on every rank, then share `outcome["mine"]` as `outcome["all"]`; one rank's error is everyone's."""
    outcome: dict[str, Any] = {"mine": None}
    error = None
    try:
        yield outcome
    except (OSError, CheckpointError) as caught:
        error = str(caught)
    results = mesh.gather_json([error, outcome["mine"]])
    failed = [f"rank {rank}: {message}" for rank, (message, _) in enumerate(results) if message is not None]
    if failed:
        raise CheckpointError(f"failed while {doing}", where=str(where), why=failed[0])
    outcome["all"] = [value for _, value in results]


def _write_mine(directory: Path, shards: Mapping[str, LogicalShard], rank: int) -> dict[str, Any]:
    """Write the blocks this rank owns to one safetensors file; of replicas each writes an equal part."""
    sources: list[Source] = []
    pieces: dict[str, list[dict[str, Any]]] = {}
    file = f"rank-{rank:04d}.safetensors"
    for index, (name, shard) in enumerate(sorted(shards.items())):
        if index % shard.num_replicas != shard.replica:
            continue
        for number, box in enumerate(shard.boxes):
            key = f"{name}#{number}"
            sources.append(Source(key, shard.dtype, box.size, partial(_block_bytes, shard.tensor, box)))
            pieces.setdefault(name, []).append(asdict(Piece(file, key, box.global_offset, box.size)))
    if not sources:
        return {"pieces": {}, "file": None}
    return {"pieces": pieces, "file": [file, asdict(write_file(directory / file, sources))]}


def _block_bytes(tensor: torch.Tensor, box: Box) -> Bytes:
    block = _local_block(tensor, box).cpu().reshape(-1)
    if block.stride() != (1,):  # torch calls blocks of one element or none contiguous, whatever their strides
        block = torch.empty(block.numel(), dtype=block.dtype).copy_(block)
    found: Bytes = block.view(torch.uint8).numpy()
    return found


def _local_block(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + s) for o, s in zip(box.local_offset, box.size, strict=True))]


def _assemble(
    step: int,
    job_digest: str,
    mesh: Mesh,
    facts: Mapping[str, Any],
    aliases: Mapping[str, str],
    shards: Mapping[str, LogicalShard],
    written: list[dict[str, Any]],
) -> Manifest:
    tensors = {}
    for name, shard in sorted(shards.items()):
        found = [p for part in written for p in part["pieces"].get(name, ())]
        pieces = tuple(Piece(p["file"], p["key"], tuple(p["offset"]), tuple(p["size"])) for p in found)
        if sum(_volume(piece.size) for piece in pieces) != _volume(shard.global_shape):
            raise CheckpointError(f"the ranks' blocks of {name} do not make the whole tensor")
        tensors[name] = StoredTensor(shard.global_shape, shard.dtype, pieces)
    files = {part["file"][0]: StoredFile(**part["file"][1]) for part in written if part["file"]}
    return Manifest(step, job_digest, mesh.layout.to_json(), dict(facts), tensors, dict(aliases), files)


def _commit(unfinished: Path, final: Path, manifest: Manifest) -> None:
    write_json_atomic(unfinished / MANIFEST, manifest.to_json())
    fsync_directory(unfinished)
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():  # this step was saved before (a run continued from an older checkpoint)
        os.rename(final, replaced)
    try:
        os.rename(unfinished, final)
    except OSError:
        if replaced.exists():
            os.rename(replaced, final)
        raise
    fsync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def load(
    directory: Path,
    shards: Mapping[str, LogicalShard],
    *,
    mesh: Mesh,
    phases: Phases,
    require: Callable[[Manifest], None] = lambda manifest: None,
) -> Manifest:
    """Fill `shards` from a checkpoint of any layout. Collective.

    Names, shapes, types and checksums are checked and every block is read into staging on all ranks before any
    tensor changes; `require` may refuse the checkpoint by what its manifest says. Raises CheckpointError on every rank
    if any rank finds something wrong.
    """
    with phases("ckpt_load"):
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        manifests: list[Manifest] = []
        with _agreed(mesh, directory, "loading a checkpoint"):
            manifest = read_manifest(directory)
            require_whole_directory(directory, manifest)
            require(manifest)
            require_same_names(directory, manifest, shards)
            staged = stage_blocks(directory, manifest, shards)
            manifests.append(manifest)
        with torch.no_grad():
            for target, source in staged:
                target.copy_(source)
        return manifests[0]


def require_same_names(directory: Path, manifest: Manifest, shards: Mapping[str, LogicalShard]) -> None:
    missing = sorted(set(shards) - set(manifest.tensors))
    extra = sorted(set(manifest.tensors) - set(shards))
    wrong = [
        f"{name}: saved {list(t.shape)} {t.dtype}, wanted {list(shards[name].global_shape)} {shards[name].dtype}"
        for name, t in sorted(manifest.tensors.items())
        if name in shards and (t.shape, t.dtype) != (shards[name].global_shape, shards[name].dtype)
    ]
    parts = []
    for what, names in (("missing", missing), ("not in this model", extra), ("different", wrong)):
        if names:
            parts.append(f"{len(names)} {what}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")
    if parts:
        raise CheckpointError(
            "the checkpoint does not fit this model",
            where=str(directory),
            why="; ".join(parts),
            fix="use the job it was written by",
        )


def stage_blocks(
    directory: Path, manifest: Manifest, shards: Mapping[str, LogicalShard]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(target view, staged source) for each overlap of a wanted box with a stored piece.

    Only the chunks that hold wanted bytes are read; each is verified in memory before anything is taken from it.
    """
    staged = []
    for file, reads in sorted(_wanted(directory, manifest, shards).items()):
        with CheckedFile(directory, file, manifest.files[file]) as source:
            reads.sort(key=lambda read: source.entries[read[0].key].start if read[0].key in source.entries else -1)
            for piece, shard, box in reads:
                entry = _entry(source, piece, shard)
                start, size = _overlap(box, piece) or ((), ())
                inside = tuple(s - o for s, o in zip(start, piece.offset, strict=True))
                block = torch.from_numpy(source.read_block(entry, inside, size))
                target = shard.tensor[
                    tuple(
                        slice(s - g + o, s - g + o + n)
                        for s, g, o, n in zip(start, box.global_offset, box.local_offset, size, strict=True)
                    )
                ]
                staged.append((target, block.view(target.dtype).reshape(size)))
    return staged


def _wanted(
    directory: Path, manifest: Manifest, shards: Mapping[str, LogicalShard]
) -> dict[str, list[tuple[Piece, LogicalShard, Box]]]:
    """By file: which pieces this rank's boxes overlap. CheckpointError if they do not cover a box."""
    wanted: dict[str, list[tuple[Piece, LogicalShard, Box]]] = {}
    for name, shard in shards.items():
        for box in shard.boxes:
            covered = 0
            for piece in manifest.tensors[name].pieces:
                if overlap := _overlap(box, piece):
                    covered += _volume(overlap[1])
                    wanted.setdefault(piece.file, []).append((piece, shard, box))
            if covered != _volume(box.size):
                raise CheckpointError(f"{name} is not whole in the checkpoint", where=str(directory))
    return wanted


def _entry(source: CheckedFile, piece: Piece, shard: LogicalShard) -> Entry:
    """The file's own header must say what the manifest says, else a copy would cast or broadcast in silence."""
    entry = source.entries.get(piece.key)
    if entry is None:
        raise CheckpointError(f"there is no {piece.key} in it", where=str(source.path))
    if (entry.shape, entry.dtype) != (piece.size, DTYPES[shard.dtype][0]):
        raise CheckpointError(
            f"{piece.key} is {entry.dtype} {list(entry.shape)} in it, not {shard.dtype} {list(piece.size)}",
            where=str(source.path),
        )
    return entry


def _overlap(box: Box, piece: Piece) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(global start, size) of what a box and a piece share, or None."""
    starts, sizes = [], []
    for b, bn, p, pn in zip(box.global_offset, box.size, piece.offset, piece.size, strict=True):
        start, stop = max(b, p), min(b + bn, p + pn)
        if stop <= start:
            return None
        starts.append(start)
        sizes.append(stop - start)
    return tuple(starts), tuple(sizes)


def _volume(size: tuple[int, ...]) -> int:
    volume = 1
    for length in size:
        volume *= length
    return volume
