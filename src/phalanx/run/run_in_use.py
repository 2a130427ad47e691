"""A look at the lock of a run directory before anything slow is imported: whether a job has the
run, and whether anything more can come of it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint.ownership.run_lock import (
    LOCK_FILE_NAME,
    find_live_holder,
    read_lock_holder,
    refuse_run_of_live_job,
)
from phalanx.job.load import load_job
from phalanx.launch.external import read_external_launch
from phalanx.launch.output_destination import list_output_destinations
from phalanx.launch.paths import BLACK_BOXES, EVENTS, next_attempt_number
from phalanx.launch.positions import read_rank_states

# Nobody starts a run again whose supervisor is gone.
_CUT_OFF_S = 60.0
# A launcher may start ranks again: they import torch, meet, and rank 0 prepares, before a file of
# the run changes.
_LAUNCHER_RESTART_S = 600.0


def refuse_run_in_use(job_file: str | None, overrides: Sequence[str], resume: str | None) -> None:
    """Raise RunLockedError (exit 9) if a live job holds the run directory that these arguments lead
    to.

    Raises JobError for a job that cannot be loaded. Ranks of another launcher share one lock: only
    the leader takes it.
    """
    # A copy: asking writes what it finds into the environment.
    if read_external_launch(dict(os.environ)) is not None:
        return
    run_dir = resume
    if run_dir is None:
        run_dir = load_job(job_file, overrides).run.dir
    if run_dir:
        refuse_run_of_live_job(Path(run_dir))


def is_run_cut_off(run_dir: Path, *, has_events: bool = True) -> bool:
    """True if the processes of a run are known to be gone, and nothing has written for a minute, or
    for ten where another launcher started them: whoever waits for more most likely waits in vain.

    False where that cannot be told: ranks of another machine, or a run that left neither a lock nor
    black boxes. One that has no event either is none that goes on. Raises UsageError for black
    boxes of a newer phalanx.
    """
    if find_live_holder(run_dir) is not None:
        return False
    states = read_rank_states(run_dir, sample_s=0.0)
    if any(state.process.state != "gone" for state in states.values()):
        return False
    # A job that ends removes its lock: what is left is of one that was killed.
    if not states and has_events and read_lock_holder(run_dir / LOCK_FILE_NAME) is None:
        return False
    return find_silence_s(run_dir) > choose_cut_off_limit_s(run_dir)


def choose_cut_off_limit_s(run_dir: Path) -> float:
    """How long nothing may have written to a run whose processes are gone, until it counts as cut
    off."""
    destinations = list_output_destinations(run_dir)
    newest = max((each.attempt for each in destinations), default=-1)
    # A run may go on under another launcher than it began with.
    if newest >= 0 and newest >= next_attempt_number(run_dir) - 1:
        return _LAUNCHER_RESTART_S
    return _CUT_OFF_S


def find_silence_s(run_dir: Path) -> float:
    """For how long the processes of a run have changed nothing in it."""
    return time.time() - _find_last_change_unix_s(run_dir)


def _find_last_change_unix_s(run_dir: Path) -> float:
    """The time of the newest change that the processes of a run have made; 0 where none is seen."""
    newest_s = 0.0
    for path in (
        run_dir / LOCK_FILE_NAME,
        *(run_dir / EVENTS).glob("*"),
        *(run_dir / BLACK_BOXES).glob("*"),
    ):
        with suppress(OSError):
            newest_s = max(newest_s, path.lstat().st_mtime)
    return newest_s
