"""Which checkpoint of a run is meant: the newest, or the best. Torch-free."""

from __future__ import annotations

from pathlib import Path

from phalanx.checkpoint.best import read_best
from phalanx.checkpoint.folder import Folder
from phalanx.checkpoint.stores import find_checkpoint, is_url, run_at, store_of
from phalanx.core.errors import CheckpointError


def choose_checkpoint(place: str | Path, *, best: bool = False) -> Folder:
    """One checkpoint: the folder at `place`, or of the run that is there the newest, or the one
    eval.keep_best kept.

    Raises CheckpointError.
    """
    if not best:
        return find_checkpoint(place)
    place = run_at(place)
    kept = None if is_url(place) else read_best(Path(place))
    if kept is None:
        fix = "train with eval.keep_best=true"
        raise CheckpointError("no checkpoint was kept as the best", where=str(place), fix=fix)
    for folder in store_of(place).folders():
        if folder.step == kept.step:
            return folder
    raise CheckpointError(
        "the best checkpoint is gone", where=str(place), why=f"step {kept.step} is not there"
    )
