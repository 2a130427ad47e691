"""Chooses a checkpoint of a run: the newest, or the best. Torch-free."""

from __future__ import annotations

from pathlib import Path

from phalanx.checkpoint.best import read_best_step
from phalanx.checkpoint.folder import CheckpointFolder
from phalanx.checkpoint.stores import (
    find_checkpoint_at_or_newest,
    find_run_directory,
    is_store_url,
    open_store_of_location,
)
from phalanx.core.errors import CheckpointError


def find_newest_or_best_checkpoint(location: str | Path, *, best: bool = False) -> CheckpointFolder:
    """The checkpoint at `location`; of a run there the newest, or with `best` the one that
    eval.keep_best recorded.

    Raises CheckpointError.
    """
    if not best:
        return find_checkpoint_at_or_newest(location)
    location = find_run_directory(location)
    recorded = None
    # The record is in the run directory, not in its store.
    if not is_store_url(location):
        recorded = read_best_step(Path(location))
    if recorded is None:
        fix = "train with eval.keep_best=true"
        raise CheckpointError("no checkpoint was kept as the best", where=str(location), fix=fix)
    for folder in open_store_of_location(location).folders():
        if folder.step == recorded.step:
            return folder
    raise CheckpointError(
        "the best checkpoint is gone", where=str(location), why=f"step {recorded.step} is not there"
    )
