"""RUN/epoch: how many times a job has taken this run. What an older one still writes is refused. Torch-free.

A job that was thought dead (a stopped machine, a network that came back) may wake up while another continues its run.
The lock cannot tell it: it took the lock when that was right. Its epoch can: it is older than the one in the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.core.disk import Disk, write_bytes_durably
from phalanx.core.errors import CheckpointError
from phalanx.core.files import read_regular, resource_error

EPOCH = "epoch"


def read_epoch(run_dir: Path) -> int:
    """The epoch of the job that took the run last; 0 if none counted. Raises CheckpointError for a damaged file."""
    path = run_dir / EPOCH
    try:
        return int(read_regular(path, 100).decode("ascii"))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        fix = "write the number of restarts into it, or a larger one"
        raise CheckpointError("the run's epoch cannot be read", where=str(path), why=str(error), fix=fix) from None


@dataclass(frozen=True)
class Epoch:
    """A job's claim on a run."""

    run_dir: Path
    number: int

    def require_newest(self) -> None:
        """Raise CheckpointError if another job took the run since."""
        newest = read_epoch(self.run_dir)
        if newest != self.number:
            raise CheckpointError(
                "another job took this run", where=str(self.run_dir), why=f"its epoch is {newest}, not {self.number}"
            )


def take_epoch(run_dir: Path, disk: Disk | None = None) -> Epoch:
    """Claim the run for this job, or for another attempt of it. For the holder of the run's lock.

    Raises ResourceError if the run directory cannot be written.
    """
    epoch = Epoch(run_dir, read_epoch(run_dir) + 1)
    try:
        write_bytes_durably(disk or Disk(), run_dir / EPOCH, f"{epoch.number}\n".encode())
    except OSError as error:
        raise resource_error(error, "taking the run directory", run_dir / EPOCH) from None
    return epoch
