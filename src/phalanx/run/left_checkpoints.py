"""Checkpoints that a run has left behind when it went back to before them. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.checkpoint.folder import CheckpointFolder
from phalanx.checkpoint.manifest import read_manifest
from phalanx.checkpoint.stores import Store
from phalanx.core.errors import CheckpointError
from phalanx.observe.events import Event, Note
from phalanx.run.rank_run import RollBacks

CHECKPOINT_LEFT_OUT = "checkpoint_left_out"


def remove_left_checkpoints(
    store: Store,
    folders: Sequence[CheckpointFolder],
    roll_backs: RollBacks,
    emit: Callable[[Event], None],
) -> list[CheckpointFolder]:
    """Those of `folders` that may be used after `roll_backs`, in their order.

    A checkpoint after the step that the run went back to is removed if it was saved before that. It
    is used if it was saved since, whatever events say: they can be lost. Where neither is known it
    stays, is not used, and `emit` gets a note that says so. Raises CheckpointError or OSError if
    one cannot be removed.
    """
    limit = roll_backs.find_limit()
    if limit is None:
        return list(folders)
    usable = []
    for folder in folders:
        if folder.step <= limit:
            usable.append(folder)
            continue
        epoch, why = _read_epoch(folder)
        if not epoch or not roll_backs.ended_epoch:
            emit(
                Note(
                    CHECKPOINT_LEFT_OUT,
                    {
                        "step": folder.step,
                        "why": (
                            f"the run went back to step {limit} or before, and whether"
                            f" {folder.name} was saved before or since is not known ({why}); it"
                            " stays where it is"
                        ),
                    },
                )
            )
        elif epoch <= roll_backs.ended_epoch:
            store.remove(folder)
        else:
            usable.append(folder)
    return usable


def _read_epoch(folder: CheckpointFolder) -> tuple[int, str]:
    """The epoch of the attempt that saved a checkpoint, 0 where that is not known; and why it, or
    that of the roll back, is not."""
    try:
        epoch = read_manifest(folder).epoch
    except (CheckpointError, OSError) as error:
        return 0, str(error)
    if epoch:
        return epoch, "an earlier release did not record when the run went back"
    return 0, "its manifest has no epoch"
