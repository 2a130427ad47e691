"""A fence around a run: a job that was taken for dead, and wakes up, finds that the run is no
longer its own. Torch-free.

So does a job whose run directory was removed or moved: it trains for nothing.

Such a job must do nothing more to the run: not a step, not an event, not a page. However often it
is asked, the fence looks at two small files once a second; a process that was stopped for longer
looks before it does anything else. Stopped between its look and a write, it ends that one write.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.ownership.fencing_token import (
    FencingToken,
    describe_job_of_newest_token,
    find_removal_of_run,
    read_fencing_token_number,
)
from phalanx.checkpoint.ownership.run_lock import LOCK_FILE_NAME, LockHolder, read_lock_holder
from phalanx.core.errors import CheckpointError, RunRemovedError, RunTakenError

FENCE_CHECK_INTERVAL_S = 1.0
# CLOCK_BOOTTIME, where there is one, goes on while the whole machine is suspended: the process must
# look after that, too.
_BOOT_CLOCK_ID = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


@dataclass(frozen=True)
class RunOwnershipClaim:
    """A job's claim on a run, as its ranks are told of it.

    `epoch` is the number of its fencing token, 0 where claims are not counted; `holder` holds the
    lock, None where that is not known.
    """

    epoch: int = 0
    holder: LockHolder | None = None


class RunOwnershipWatch:
    """Finds out if another job has taken the run of the job whose lock names `holder`, or if its
    directory was removed.

    `token` is the job's newest fencing token; None before it has one.
    """

    def __init__(
        self, run_dir: Path, holder: LockHolder | None, token: FencingToken | None = None
    ) -> None:
        self.token = token
        self._run_dir, self._holder = run_dir, holder
        # Training may change the process's directory.
        self._place = run_dir.absolute()
        # None where the directory cannot be seen: then nothing says that it was removed.
        self._device = _find_device(run_dir)
        self._looked_s = time.clock_gettime(_BOOT_CLOCK_ID)
        self._taker: str | None = None
        self._removal: RunRemovedError | None = None
        # Where renames are not atomic (some network file systems), a file that is replaced is
        # missing for a moment: it counts when it is missing a second time.
        self._was_missing = False

    @classmethod
    def for_rank(cls, run_dir: Path, claim: RunOwnershipClaim) -> RunOwnershipWatch:
        """The fence of a rank whose job has made `claim`."""
        if not claim.epoch:
            return cls(run_dir, claim.holder)
        return cls(run_dir, claim.holder, FencingToken(run_dir, claim.epoch))

    def is_lost(self, *, now: bool = False) -> bool:
        """True once another job has taken the run, or its directory was removed, and for ever
        after. Looks at once if `now`."""
        at_s = time.clock_gettime(_BOOT_CLOCK_ID)
        is_due = now or at_s - self._looked_s >= FENCE_CHECK_INTERVAL_S
        if is_due and self._taker is None and self._removal is None:
            self._looked_s = at_s
            self._look(is_patient=not now)
        return self._taker is not None or self._removal is not None

    def run_taken_error(self) -> RunTakenError:
        """The error of a job that has lost its run: it names the job that has it, or says that
        nobody has it any more."""
        # For the name of the job, which may be there by now.
        is_found = self.is_lost(now=True)
        # Another rank has found it, whose look this one takes for true.
        removal = self._removal if is_found else find_removal_of_run(self._place)
        if removal is not None:
            return removal
        taker = self._taker or "another job, which has not said its name"
        fix = "this one has stopped, and changed nothing since; leave the run to that job"
        message = f"another job has this run: {taker}"
        return RunTakenError(message, where=str(self._run_dir), fix=fix)

    def _look(self, *, is_patient: bool) -> None:
        self._taker = self._find_job_that_took_run()
        missing = None
        if self._taker is None and self.token is not None and self._device is not None:
            missing = find_removal_of_run(self._place, self._device)
        if self._was_missing or not is_patient:
            self._removal = missing
        self._was_missing = missing is not None

    def _find_job_that_took_run(self) -> str | None:
        """The job that has the run instead of this one; None if no other job has it, or if its
        files cannot be read."""
        holder = read_lock_holder(self._run_dir / LOCK_FILE_NAME)
        # The lock first: it says so even before the other job has a token.
        if holder and self._holder and not holder.is_held_by_same_job(self._holder):
            return str(holder)
        if self.token is None:
            return None
        try:
            newest = read_fencing_token_number(self._run_dir)
        except CheckpointError:
            # A file that cannot be read for a moment takes no run away.
            return None
        if newest <= self.token.number:
            return None
        return describe_job_of_newest_token(self._run_dir) or f"a later one (epoch {newest})"


def _find_device(run_dir: Path) -> int | None:
    try:
        return os.stat(run_dir).st_dev
    except OSError:
        return None
