"""The fencing token of a run, RUN/epoch: the number of times that a job has taken this run.

Writes of a job with an older token are refused. Torch-free.

A job that was thought dead (a stopped machine, a network that came back) may wake up while another
continues its run. The lock cannot tell it: it took the lock when that was right. Its token can: it
is older than the one in the file.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpoint.os_errors import convert_os_error
from phalanx.core.disk import Disk, write_bytes_durably
from phalanx.core.disk_errors import build_path_resource_error, suggest_fix_for_path_error
from phalanx.core.errors import CheckpointError, RunRemovedError, RunTakenError
from phalanx.core.files import read_whole_regular_file
from phalanx.core.printable import printable

TOKEN_FILE_NAME = "epoch"
# A number, and a line that names the job.
MAX_TOKEN_BYTES = 1000
_UNREADABLE_TOKEN_MESSAGE = "the run's epoch cannot be read"
_UNREADABLE_TOKEN_FIX = "write the number of restarts into it, or a larger one"
# The number alone, or the number and a line of who took the run.
_TOKEN_FILE_PATTERN = re.compile(r"\s*([0-9]{1,18})\s*|([0-9]{1,18})\n[^\n]+\n")


def read_fencing_token_number(run_dir: Path, *, if_damaged: int = 0) -> int:
    """The token number of the job that took the run last; 0 if no job counted.

    `if_damaged`, where it is not 0, is the number if the file holds none (someone has emptied it).
    Raises CheckpointError for a damaged file.
    """
    path = run_dir / TOKEN_FILE_NAME
    try:
        text = read_whole_regular_file(path, MAX_TOKEN_BYTES).decode()
        match = _TOKEN_FILE_PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"it holds {text[:40]!r}")
        return int(match[1] or match[2])
    except FileNotFoundError:
        return 0
    except OSError as error:
        fix = suggest_fix_for_path_error(error, path) or _UNREADABLE_TOKEN_FIX
        raise convert_os_error(error, _UNREADABLE_TOKEN_MESSAGE, str(path), fix) from None
    except ValueError as error:
        if if_damaged:
            return if_damaged
        raise CheckpointError(
            _UNREADABLE_TOKEN_MESSAGE, where=str(path), why=str(error), fix=_UNREADABLE_TOKEN_FIX
        ) from None


def describe_job_of_newest_token(run_dir: Path) -> str:
    """The job that took the run last, in words for people; empty if its token does not name it."""
    try:
        taker = (
            read_whole_regular_file(run_dir / TOKEN_FILE_NAME, MAX_TOKEN_BYTES)
            .decode()
            .split("\n")[1]
        )
    except (OSError, ValueError, IndexError):
        return ""
    return printable(taker, 200)


def find_removal_of_run(run_dir: Path, device: int | None = None) -> RunRemovedError | None:
    """The error of a run whose directory or token was removed; None while both are there, or where
    that cannot be seen.

    `device` (st_dev) is that of the directory when it was there: a file system that is not mounted
    for a moment has removed nothing.
    """
    try:
        os.stat(run_dir)
        os.stat(run_dir / TOKEN_FILE_NAME)
    except FileNotFoundError as error:
        what, where = "run directory", run_dir
        if error.filename != os.fspath(run_dir):
            what, where = "run's epoch", run_dir / TOKEN_FILE_NAME
        if device is not None and _find_device_above(where) != device:
            return None
        return RunRemovedError(
            f"the {what} was removed or moved while the run trained: {where};"
            " nothing more can be saved there"
        )
    except OSError:
        # A file system that does not answer for a while (ESTALE, EIO, ETIMEDOUT).
        return None
    return None


def _find_device_above(path: Path) -> int | None:
    """The device of the nearest directory above `path` that is there; None where that cannot be
    seen."""
    for folder in path.absolute().parents:
        try:
            return os.stat(folder).st_dev
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


@dataclass(frozen=True)
class FencingToken:
    """A job's claim on a run."""

    run_dir: Path
    number: int

    def require_newest_token(self, *, if_damaged: int = 0) -> None:
        """Raise RunTakenError if another job took the run since, RunRemovedError if there is no
        token any more. `if_damaged`: as in `read_fencing_token_number`."""
        newest = read_fencing_token_number(self.run_dir, if_damaged=if_damaged)
        if newest != self.number:
            if not newest and (removal := find_removal_of_run(self.run_dir)) is not None:
                raise removal
            why = f"its epoch is {newest}, not {self.number}"
            taker = describe_job_of_newest_token(self.run_dir)
            message = "another job took this run"
            if taker:
                message += f": {taker}"
            raise RunTakenError(message, where=str(self.run_dir), why=why)


def write_next_fencing_token(
    run_dir: Path, disk: Disk | None = None, *, taker: str = "", if_damaged: int = 0
) -> FencingToken:
    """Claim the run for this job, or for another attempt of it. For the holder of the run's lock.

    `taker` names this job, for a job that finds the run taken: the lock may be gone by then.
    `if_damaged`: as in `read_fencing_token_number`. Raises ResourceError if the run directory
    cannot be written.
    """
    number = read_fencing_token_number(run_dir, if_damaged=if_damaged) + 1
    return _write_fencing_token(run_dir, number, disk or Disk(), taker)


def mend_fencing_token(run_dir: Path, number: int, *, taker: str = "") -> None:
    """Write token `number`, the newest, again if the file holds none. For the holder of the run's
    lock."""
    if read_fencing_token_number(run_dir, if_damaged=-1) == -1:
        _write_fencing_token(run_dir, number, Disk(), taker)


def _write_fencing_token(run_dir: Path, number: int, disk: Disk, taker: str) -> FencingToken:
    token = FencingToken(run_dir, number)
    text = f"{token.number}\n"
    if taker:
        text += f"{taker}\n"
    try:
        # Durable before the token is used: a crash must not give its number to another job.
        write_bytes_durably(disk, run_dir / TOKEN_FILE_NAME, text.encode())
    except OSError as error:
        raise build_path_resource_error(
            error, "taking the run directory", run_dir / TOKEN_FILE_NAME
        ) from None
    return token
