"""Lists the checkpoints at a location, with facts of their manifests. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from phalanx.checkpoint.best import BestStepRecord, read_best_step
from phalanx.checkpoint.folder import CheckpointFolder
from phalanx.checkpoint.manifest import Manifest, read_manifest
from phalanx.checkpoint.stores import (
    find_checkpoint_at_or_newest,
    find_run_directory,
    is_location_of_one_checkpoint,
    is_store_url,
    open_store_of_location,
)
from phalanx.core.errors import CheckpointError, UsageError
from phalanx.core.store_urls import parse_file_url_directory


@dataclass(frozen=True)
class ListedCheckpoint:
    """Facts of one checkpoint's manifest. `error` says why it cannot be read; then nothing else is
    known.

    `layout`: degrees by axis of the ranks that wrote it. `epoch` counts the jobs that have had the
    run, this one included. `collectives`: what those ranks exchanged tensors through; empty where
    that is not written down.
    """

    name: str
    step: int
    error: str | None = None
    written_unix_s: float = 0.0
    num_bytes: int = 0
    num_files: int = 0
    num_tensors: int = 0
    layout: Mapping[str, int] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    epoch: int = 0
    collectives: str = ""

    def to_json(self) -> dict[str, Any]:
        """An object of `phalanx checkpoint ls --json`."""
        if self.error is not None:
            return {"name": self.name, "step": self.step, "error": self.error}
        return asdict(self)


@dataclass(frozen=True)
class CheckpointListing:
    """Checkpoints, oldest first. `best_step`: that of the run's best one; None if the run has none,
    or in a store.
    """

    entries: tuple[ListedCheckpoint, ...]
    best_step: int | None


def list_checkpoints(location: str) -> CheckpointListing:
    """List the checkpoints of a run, or the one at `location`. Raises UsageError or CheckpointError
    if there is none.
    """
    if is_location_of_one_checkpoint(location):
        folders = [find_checkpoint_or_newest_of_run(location)]
    else:
        folders = find_all_checkpoints_of_run(location)
    best = _read_best_checkpoint_of_run(location)
    best_step = None
    if best is not None:
        best_step = best.step
    return CheckpointListing(tuple(map(_read_listed_checkpoint, folders)), best_step)


def find_checkpoint_or_newest_of_run(location: str) -> CheckpointFolder:
    """The checkpoint at `location`, or the newest of the run there. Raises UsageError or
    CheckpointError.
    """
    if not is_location_of_one_checkpoint(location):
        return find_all_checkpoints_of_run(location)[-1]
    directory = parse_file_url_directory(location)
    if directory is None and not is_store_url(location):
        directory = Path(location)
    if directory is not None and not os.path.lexists(directory):
        _refuse_missing_directory(location)
    return find_checkpoint_at_or_newest(location)


def find_all_checkpoints_of_run(run: str) -> list[CheckpointFolder]:
    """Every checkpoint of a run, oldest first. Raises UsageError or CheckpointError if there is
    none.
    """
    run = str(find_run_directory(run))
    if not is_store_url(run) and not Path(run).is_dir():
        _refuse_missing_directory(run)
    folders = open_store_of_location(run).folders()
    if not folders and is_location_of_one_checkpoint(run):
        raise UsageError(
            "this is one checkpoint, and not a run", where=run, fix="give the run's directory"
        )
    if not folders:
        fix = "checkpoint.every_steps and checkpoint.at_end say when a run saves"
        raise CheckpointError("no checkpoint is there", where=run, fix=fix)
    return folders


def _read_listed_checkpoint(folder: CheckpointFolder) -> ListedCheckpoint:
    try:
        manifest = read_manifest(folder)
        written_unix_s = folder.written_unix_s()
        _require_sizes_of_manifest(folder, manifest)
    except (CheckpointError, OSError) as error:
        return ListedCheckpoint(folder.name, folder.step, error=str(error))
    return ListedCheckpoint(
        folder.name,
        folder.step,
        written_unix_s=written_unix_s,
        num_bytes=manifest.num_bytes,
        num_files=len(manifest.files),
        num_tensors=len(manifest.tensors),
        layout=manifest.layout,
        facts=manifest.facts,
        epoch=manifest.epoch,
        collectives=manifest.collectives,
    )


def _require_sizes_of_manifest(folder: CheckpointFolder, manifest: Manifest) -> None:
    """Raise CheckpointError for a file that is missing or has another size than was written.

    Nothing is read: bytes that changed are for `phalanx checkpoint verify`.
    """
    sizes = folder.file_sizes()
    for name, stored in manifest.files.items():
        if name not in sizes:
            raise CheckpointError(f"{name} is missing", where=folder.url)
        if sizes[name] != stored.num_bytes:
            raise CheckpointError(
                f"{name} has {sizes[name]:,} bytes instead of {stored.num_bytes:,}",
                where=folder.url,
            )


def _read_best_checkpoint_of_run(run: str) -> BestStepRecord | None:
    """The best checkpoint by the run's directory; None at a URL, where nothing records it."""
    location = find_run_directory(run)
    if is_store_url(location):
        return None
    return read_best_step(Path(location))


def _refuse_missing_directory(location: str) -> NoReturn:
    raise UsageError(
        "no such directory", where=location, fix="give a run's directory, a checkpoint's, or a URL"
    )
