"""Remove old checkpoints of a run that no job is using: `phalanx checkpoint prune`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.best import read_best_step_to_protect
from phalanx.checkpoint.ownership.run_lock import holding_run_lock
from phalanx.checkpoint.ownership.store_owner import find_store_refusal_reason
from phalanx.checkpoint.reading.listing import find_all_checkpoints_of_run
from phalanx.checkpoint.stores import find_run_directory, is_store_url, open_store_of_location
from phalanx.checkpoint.writing.retention import RetentionRule, prune_checkpoints
from phalanx.core.errors import UsageError


@dataclass(frozen=True)
class PrunedCheckpoints:
    """Names of checkpoints, oldest first. `notes` say which ones do not verify, and why nothing was
    removed.
    """

    removed: tuple[str, ...]
    kept: tuple[str, ...]
    notes: tuple[str, ...]


def prune_run(
    run: str, *, keep_last: int, keep_every: int | None, dry_run: bool
) -> PrunedCheckpoints:
    """Remove the checkpoints that need not be kept; a `dry_run` returns the same and removes
    nothing.

    The best one and the newest that verifies always stay. Raises RunLockedError while a job is
    using the run (it prunes by itself), UsageError for a URL, CheckpointError if there is no
    checkpoint or one cannot be removed.
    """
    location = str(find_run_directory(run))
    if is_store_url(location):
        why = (
            "a store knows neither the job that writes it nor the best checkpoint; the run's"
            " directory does"
        )
        fix = "prune the run: phalanx checkpoint prune RUN"
        raise UsageError(
            "checkpoints at a URL are not pruned by themselves", where=run, why=why, fix=fix
        )
    find_all_checkpoints_of_run(location)
    run_dir = Path(location)
    notes: list[str] = []
    with holding_run_lock(run_dir):
        store = open_store_of_location(location)
        if (refusal := find_store_refusal_reason(store, run_dir)) is not None:
            raise refusal
        folders = store.folders()
        retention = RetentionRule(keep_last, keep_every, read_best_step_to_protect(run_dir))
        removed = prune_checkpoints(store, retention, dry_run=dry_run, say=notes.append)
    remaining_names = tuple(folder.name for folder in folders if folder not in removed)
    return PrunedCheckpoints(
        tuple(folder.name for folder in removed), remaining_names, tuple(notes)
    )
