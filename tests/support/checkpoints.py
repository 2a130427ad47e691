"""Checkpoints as tests want them: ranks that are threads, and in one place what the store is
asked for."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from phalanx.checkpoint.folder import CheckpointFolder
from phalanx.checkpoint.manifest import (
    MANIFEST_FILE_NAME,
    Manifest,
    StoredPiece,
    compute_manifest_checksum,
    encode_canonical_manifest,
    read_manifest,
)
from phalanx.checkpoint.reading.load import load_checkpoint_into_shards
from phalanx.checkpoint.shard_file import VerifiedSafetensorsFile
from phalanx.checkpoint.stores import open_store_of_run
from phalanx.checkpoint.writing.write import RankSnapshot, write_checkpoint
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.logical import Box, LogicalShard
from phalanx.plan.layout import Layout
from phalanx.train.state import TrainState

DEADLINE_S = 300.0
CHUNK_BYTES = 4 << 20  # what docs/checkpoint-format.md says
Tensors = dict[str, torch.Tensor]


@dataclass
class _Board:
    """Where the threads of a group leave what they say to each other."""

    barrier: threading.Barrier
    said: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ThreadRank:
    """One rank of a group of threads: all that the store asks of a mesh."""

    rank: int
    layout: Layout
    board: _Board

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    def describe_collectives(self) -> str:
        return "threads" if self.world_size > 1 else ""

    def gather_json(self, value: Any) -> list[Any]:
        self.board.said[self.rank] = json.dumps(value)
        self.board.barrier.wait(DEADLINE_S)
        found = [json.loads(self.board.said[rank]) for rank in range(self.world_size)]
        self.board.barrier.wait(DEADLINE_S)
        return found


def run_threads(layout: Layout, function: Callable[[ThreadRank], Any]) -> list[Any]:
    """`function(group)` on every rank of `layout`, each a thread; their results in rank order,
    or the first error."""
    board = _Board(threading.Barrier(layout.world_size))

    def run(rank: int) -> Any:
        try:
            return function(ThreadRank(rank, layout, board))
        except BaseException:
            board.barrier.abort()  # the others must not wait for this one
            raise

    with ThreadPoolExecutor(layout.world_size) as pool:
        futures = [pool.submit(run, rank) for rank in range(layout.world_size)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


def save_shards(
    run_dir: Path,
    step: int,
    shards: Mapping[str, LogicalShard],
    group: Any,
    *,
    aliases: Mapping[str, str] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Save hand-made shards. Collective; the checkpoint's directory."""
    write_checkpoint(
        open_store_of_run(run_dir, None),
        RankSnapshot(step, shards, aliases or {}, facts or {}),
        job_digest="",
        group=group,
        phases=PhaseTimer(),
    )
    return newest(run_dir)


def load_shards(directory: Path, shards: Mapping[str, LogicalShard], group: Any) -> Manifest:
    """Fill hand-made shards from a checkpoint. Collective."""
    return load_checkpoint_into_shards(directory, shards, group=group, phases=PhaseTimer())


def save_state(state: TrainState, run_dir: Path) -> Path:
    """Save a state; its checkpoint's directory. Collective."""
    state.save(open_store_of_run(run_dir, None), job_digest="", phases=PhaseTimer())
    return newest(run_dir)


def restore_state(state: TrainState, directory: Path) -> None:
    """Collective; raises CheckpointError with the state untouched."""
    state.restore(directory, phases=PhaseTimer())


def newest(run_dir: Path) -> Path:
    """The newest checkpoint's directory."""
    folders: list[CheckpointFolder] = open_store_of_run(run_dir, None).folders()
    return run_dir / "checkpoints" / folders[-1].name


@contextmanager
def counting_reads() -> Iterator[dict[str, int]]:
    """Bytes that this process (all its threads) reads of each file of a checkpoint, as the files
    count them."""
    found: dict[str, int] = {}
    leave = VerifiedSafetensorsFile.__exit__

    def counted(self: VerifiedSafetensorsFile, *problem: object) -> None:
        found[self._name] = found.get(self._name, 0) + self.num_bytes_read
        leave(self, *problem)

    VerifiedSafetensorsFile.__exit__ = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        VerifiedSafetensorsFile.__exit__ = leave  # type: ignore[method-assign]


def bytes_needed(directory: Path, wanted: Mapping[str, LogicalShard]) -> dict[str, int]:
    """By file, the bytes of the chunks in which a byte of a wanted block lies, and of those that
    hold the header.

    Found element run by element run, from the manifest and the headers alone.
    """
    manifest = read_manifest(directory)
    chunks: dict[str, set[int]] = {}
    for name, shard in wanted.items():
        for piece in manifest.tensors[name].pieces:
            with open(directory / piece.file, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                offset = 8 + length + json.loads(file.read(length))[piece.key]["data_offsets"][0]
            for box in shard.boxes:
                runs = list(_runs(box, piece, shard.tensor.element_size()))
                if runs:
                    chunks.setdefault(piece.file, set()).update(
                        range((8 + length - 1) // CHUNK_BYTES + 1)
                    )
                for begin, last in runs:
                    first, end = (offset + begin) // CHUNK_BYTES, (offset + last) // CHUNK_BYTES + 1
                    chunks[piece.file].update(range(first, end))
    sizes = {name: stored.num_bytes for name, stored in manifest.files.items()}
    return {
        file: sum(min(CHUNK_BYTES, sizes[file] - number * CHUNK_BYTES) for number in numbers)
        for file, numbers in chunks.items()
    }


def _runs(box: Box, piece: StoredPiece, item_bytes: int) -> Iterator[tuple[int, int]]:
    """First and last byte, inside a piece, of each row of what it shares with a box."""
    inside = [
        range(max(b, p) - p, min(b + size, p + length) - p)
        for b, size, p, length in zip(
            box.global_offset, box.size, piece.offset, piece.size, strict=True
        )
    ]
    if any(not len(places) for places in inside):
        return
    if not inside:
        yield 0, item_bytes - 1
        return
    for place in itertools.product(*inside[:-1]):
        element = 0
        for index, extent in zip((*place, inside[-1].start), piece.size, strict=True):
            element = element * extent + index
        yield item_bytes * element, item_bytes * (element + len(inside[-1])) - 1


def edit_manifest(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest as someone would who also knows how to write its checksum."""
    path = directory / MANIFEST_FILE_NAME
    body = json.loads(path.read_text())
    change(body)
    body["xxh3"] = compute_manifest_checksum(body)
    path.write_bytes(encode_canonical_manifest(body))
