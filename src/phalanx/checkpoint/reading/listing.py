"""Lists the checkpoints at a location, with facts of their manifests. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from phalanx.checkpoint.best import BestStep, read_best_step
from phalanx.checkpoint.folder import Folder
from phalanx.checkpoint.manifest import read_manifest
from phalanx.checkpoint.stores import (
    find_checkpoint,
    is_single_checkpoint,
    is_url,
    open_store_at,
    resolve_run_directory,
)
from phalanx.core.errors import CheckpointError, UsageError
from phalanx.core.store_urls import local_directory


@dataclass(frozen=True)
class CheckpointEntry:
    """Facts of one checkpoint's manifest. `error` says why it cannot be read; then nothing else is
    known.

    `layout`: degrees by axis of the ranks that wrote it. `epoch` counts the jobs that have had the
    run, this one included.
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

    entries: tuple[CheckpointEntry, ...]
    best_step: int | None


def list_checkpoints(location: str) -> CheckpointListing:
    """List the checkpoints of a run, or the one at `location`. Raises UsageError or CheckpointError
    if there is none.
    """
    if is_single_checkpoint(location):
        folders = [find_checkpoint_folder(location)]
    else:
        folders = find_checkpoint_folders(location)
    best = _find_best_checkpoint(location)
    best_step = None
    if best is not None:
        best_step = best.step
    return CheckpointListing(tuple(map(_read_entry, folders)), best_step)


def find_checkpoint_folder(location: str) -> Folder:
    """The checkpoint at `location`, or the newest of the run there. Raises UsageError or
    CheckpointError.
    """
    if not is_single_checkpoint(location):
        return find_checkpoint_folders(location)[-1]
    directory = local_directory(location)
    if directory is None and not is_url(location):
        directory = Path(location)
    if directory is not None and not os.path.lexists(directory):
        _refuse_missing(location)
    return find_checkpoint(location)


def find_checkpoint_folders(run: str) -> list[Folder]:
    """Every checkpoint of a run, oldest first. Raises UsageError or CheckpointError if there is
    none.
    """
    run = str(resolve_run_directory(run))
    if not is_url(run) and not Path(run).is_dir():
        _refuse_missing(run)
    folders = open_store_at(run).folders()
    if not folders and is_single_checkpoint(run):
        raise UsageError(
            "this is one checkpoint, and not a run", where=run, fix="give the run's directory"
        )
    if not folders:
        fix = "checkpoint.every_steps and checkpoint.at_end say when a run saves"
        raise CheckpointError("no checkpoint is there", where=run, fix=fix)
    return folders


def _read_entry(folder: Folder) -> CheckpointEntry:
    try:
        manifest = read_manifest(folder)
        written_unix_s = folder.written_unix_s()
    except (CheckpointError, OSError) as error:
        return CheckpointEntry(folder.name, folder.step, error=str(error))
    return CheckpointEntry(
        folder.name,
        folder.step,
        written_unix_s=written_unix_s,
        num_bytes=manifest.num_bytes,
        num_files=len(manifest.files),
        num_tensors=len(manifest.tensors),
        layout=manifest.layout,
        facts=manifest.facts,
        epoch=manifest.epoch,
    )


def _find_best_checkpoint(run: str) -> BestStep | None:
    """The best checkpoint by the run's directory; None at a URL, where nothing records it."""
    location = resolve_run_directory(run)
    if is_url(location):
        return None
    return read_best_step(Path(location))


def _refuse_missing(location: str) -> NoReturn:
    raise UsageError(
        "no such directory", where=location, fix="give a run's directory, a checkpoint's, or a URL"
    )
