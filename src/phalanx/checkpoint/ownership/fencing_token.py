"""RUN/epoch: how many times a job has taken this run.

What an older one still writes is refused. Torch-free.

A job that was thought dead (a stopped machine, a network that came back) may wake up while another
continues its run. The lock cannot tell it: it took the lock when that was right. Its epoch can: it
is older than the one in the file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.os_errors import unreadable
from phalanx.core.disk import Disk, write_bytes_durably
from phalanx.core.errors import CheckpointError, RunTakenError
from phalanx.core.files import fix_of, read_regular, resource_error
from phalanx.core.printable import printable

EPOCH = "epoch"
EPOCH_BYTES = 1000
UNREADABLE, WRITE_IT = (
    "the run's epoch cannot be read",
    "write the number of restarts into it, or a larger one",
)
_WRITTEN = re.compile(
    r"\s*([0-9]{1,18})\s*|([0-9]{1,18})\n[^\n]+\n"
)  # the number, and who took the run


def read_epoch(run_dir: Path) -> int:
    """The epoch of the job that took the run last; 0 if none counted.

    Raises CheckpointError for a damaged file.
    """
    path = run_dir / EPOCH
    try:
        text = read_regular(path, EPOCH_BYTES).decode()
        written = _WRITTEN.fullmatch(text)
        if written is None:
            raise ValueError(f"it holds {text[:40]!r}")
        return int(written[1] or written[2])
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise unreadable(error, UNREADABLE, str(path), fix_of(error, path) or WRITE_IT) from None
    except ValueError as error:
        raise CheckpointError(UNREADABLE, where=str(path), why=str(error), fix=WRITE_IT) from None


def read_taker(run_dir: Path) -> str:
    """The job that took the run last, in words for people; empty where it did not say."""
    try:
        words = read_regular(run_dir / EPOCH, EPOCH_BYTES).decode().split("\n")[1]
    except (OSError, ValueError, IndexError):
        return ""
    return printable(words, 200)


@dataclass(frozen=True)
class Epoch:
    """A job's claim on a run."""

    run_dir: Path
    number: int

    def require_newest(self) -> None:
        """Raise RunTakenError if another job took the run since."""
        newest = read_epoch(self.run_dir)
        if newest != self.number:
            why = f"its epoch is {newest}, not {self.number}"
            who = read_taker(self.run_dir)
            what = f"another job took this run{': ' if who else ''}{who}"
            raise RunTakenError(what, where=str(self.run_dir), why=why)


def take_epoch(run_dir: Path, disk: Disk | None = None, *, taker: str = "") -> Epoch:
    """Claim the run for this job, or for another attempt of it. For the holder of the run's lock.

    `taker` says who that is, for a job that finds the run taken: the lock may be gone by then.

    Raises ResourceError if the run directory cannot be written.
    """
    epoch = Epoch(run_dir, read_epoch(run_dir) + 1)
    text = f"{epoch.number}\n{taker}\n" if taker else f"{epoch.number}\n"
    try:
        write_bytes_durably(disk or Disk(), run_dir / EPOCH, text.encode())
    except OSError as error:
        raise resource_error(error, "taking the run directory", run_dir / EPOCH) from None
    return epoch
