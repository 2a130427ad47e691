"""Save and load logical tensors: every rank writes and reads only its own blocks, all ranks agree on the outcome."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from phalanx.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    Piece,
    StoredFile,
    StoredTensor,
    checkpoint_directory,
    file_xxh3,
    read_manifest,
    verify_file,
)
from phalanx.core.errors import CheckpointError
from phalanx.core.files import fsync_directory, write_json_atomic
from phalanx.core.phases import Phases
from phalanx.mesh.logical import Box, LogicalShard
from phalanx.mesh.mesh import Mesh

_STORED_AS = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


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
    partial = final.with_name(f".{final.name}.partial")
    with phases("ckpt_stage"):
        with _agreed(mesh, final, "preparing a checkpoint"):
            if mesh.rank == 0:
                clean_up(run_dir)
                partial.mkdir(parents=True)
    try:
        with phases("ckpt_write"):
            with _agreed(mesh, final, "writing a checkpoint") as outcome:
                outcome["mine"] = _write_mine(partial, shards, mesh.rank)
            written = outcome["all"]
        manifest = _assemble(step, job_digest, mesh, facts, aliases, shards, written)
        before_commit()
        with phases("before_commit"):
            with _agreed(mesh, final, "committing a checkpoint"):
                if mesh.rank == 0:
                    _commit(partial, final, manifest)
    except CheckpointError:
        if mesh.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    with phases("after_commit"):
        return final, manifest.num_bytes


def clean_up(run_dir: Path) -> None:
    """What a killed save left: half-written directories go, a checkpoint caught while it was replaced comes back.

    For the one process that holds the run directory's lock.
    """
    for left in (run_dir / "checkpoints").glob(".step-*.partial"):
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
    except (OSError, SafetensorError, CheckpointError) as caught:
        error = str(caught)
    results = mesh.gather_json([error, outcome["mine"]])
    failed = [f"rank {rank}: {message}" for rank, (message, _) in enumerate(results) if message is not None]
    if failed:
        raise CheckpointError(f"failed while {doing}", where=str(where), why=failed[0])
    outcome["all"] = [value for _, value in results]


def _write_mine(directory: Path, shards: Mapping[str, LogicalShard], rank: int) -> dict[str, Any]:
    """Write the blocks this rank owns to one safetensors file; of replicas each writes an equal part."""
    tensors: dict[str, torch.Tensor] = {}
    pieces: dict[str, list[dict[str, Any]]] = {}
    file = f"rank-{rank:04d}.safetensors"
    for index, (name, shard) in enumerate(sorted(shards.items())):
        if index % shard.num_replicas != shard.replica:
            continue
        for number, box in enumerate(shard.boxes):
            key = f"{name}#{number}"
            tensors[key] = _local_block(shard.tensor, box).contiguous().cpu()
            pieces.setdefault(name, []).append(asdict(Piece(file, key, box.global_offset, box.size)))
    if not tensors:
        return {"pieces": {}, "file": None}
    path = directory / file
    save_file(tensors, path)
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return {"pieces": pieces, "file": [file, path.stat().st_size, file_xxh3(path)]}


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
    files = {part["file"][0]: StoredFile(part["file"][1], part["file"][2]) for part in written if part["file"]}
    return Manifest(step, job_digest, mesh.layout.to_json(), dict(facts), tensors, dict(aliases), files)


def _commit(partial: Path, final: Path, manifest: Manifest) -> None:
    write_json_atomic(partial / MANIFEST, manifest.to_json())
    fsync_directory(partial)
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():  # this step was saved before (a run continued from an older checkpoint)
        os.rename(final, replaced)
    try:
        os.rename(partial, final)
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
    """(target view, staged source) for each overlap of a wanted box with a stored piece; files verified first."""
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
    staged = []
    for file, reads in sorted(wanted.items()):
        verify_file(directory, file, manifest.files[file])
        with safe_open(directory / file, framework="pt") as tensors:
            for piece, shard, box in reads:
                start, size = _overlap(box, piece) or ((), ())
                source = tensors.get_slice(piece.key)
                _require_block(directory, source, piece, shard)
                inside = tuple(slice(s - o, s - o + n) for s, o, n in zip(start, piece.offset, size, strict=True))
                block = source[inside] if inside else tensors.get_tensor(piece.key)
                target = shard.tensor[
                    tuple(
                        slice(s - g + o, s - g + o + n)
                        for s, g, o, n in zip(start, box.global_offset, box.local_offset, size, strict=True)
                    )
                ]
                staged.append((target, block))
    return staged


def _require_block(directory: Path, source: Any, piece: Piece, shard: LogicalShard) -> None:
    """The file's own header must say what the manifest says, else a copy would cast or broadcast in silence."""
    found = (tuple(source.get_shape()), source.get_dtype())
    if found != (piece.size, _STORED_AS.get(shard.dtype)):
        raise CheckpointError(
            f"{piece.key} is {found[1]} {list(found[0])} in {piece.file}, not {shard.dtype} {list(piece.size)}",
            where=str(directory),
        )


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
