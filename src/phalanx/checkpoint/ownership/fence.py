"""Whether a run is still this job's.

A job that was taken for dead, and wakes up, finds that it is not. Torch-free.

It must do nothing more to the run then: not a step, not an event, not a page. Asked often, the
fence looks at two small files once a second; a process that was stopped for longer looks before it
does anything else.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.ownership.fencing_token import Epoch, read_epoch, read_taker
from phalanx.checkpoint.ownership.run_lock import LOCK_NAME, Holder, holder_at
from phalanx.core.errors import CheckpointError, RunTakenError

LOOK_EVERY_S = 1.0
# Where there is one, the clock that goes on while the whole machine is suspended: the process must
# look then, too.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


@dataclass(frozen=True)
class Claim:
    """A job's claim on a run, as its ranks are told of it.

    `epoch` is its number, 0 where claims are not counted; `holder` holds the lock, None where that
    is not known.
    """

    epoch: int = 0
    holder: Holder | None = None


class Fence:
    """Of a job whose lock says `holder`.

    `epoch` is the job's newest claim; None before it has made one.
    """

    def __init__(self, run_dir: Path, holder: Holder | None, epoch: Epoch | None = None) -> None:
        self.epoch = epoch
        self._run_dir, self._holder = run_dir, holder
        self._looked_s = time.clock_gettime(_CLOCK)
        self._taker: str | None = None

    @classmethod
    def of_rank(cls, run_dir: Path, claim: Claim) -> Fence:
        """The fence of a rank whose job has made `claim`."""
        return cls(run_dir, claim.holder, Epoch(run_dir, claim.epoch) if claim.epoch else None)

    def is_lost(self, *, now: bool = False) -> bool:
        """True once another job has taken the run, and for ever after. Looks at once if `now`."""
        at_s = time.clock_gettime(_CLOCK)
        if self._taker is None and (now or at_s - self._looked_s >= LOOK_EVERY_S):
            self._looked_s = at_s
            self._taker = self._look()
        return self._taker is not None

    def error(self) -> RunTakenError:
        """What a job says that has lost its run: who has it."""
        self.is_lost(now=True)
        who = self._taker or "another job, which has not said its name"
        fix = "this one has stopped, and changed nothing since; leave the run to that job"
        return RunTakenError(f"another job has this run: {who}", where=str(self._run_dir), fix=fix)

    def _look(self) -> str | None:
        """Who has the run instead of this job; None if nobody, or if it cannot be seen."""
        there = holder_at(self._run_dir / LOCK_NAME)
        is_other = (
            there is not None and self._holder is not None and not there.is_same_job(self._holder)
        )
        if is_other:
            return str(there)
        if self.epoch is None:
            return None
        try:
            newest = read_epoch(self._run_dir)
        except CheckpointError:
            return None
        if newest <= self.epoch.number:
            return None
        return read_taker(self._run_dir) or f"a later one (epoch {newest})"
