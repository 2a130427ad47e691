"""Errors and delays of what a run's processes write, where a drill has put a library before the
operating system's calls."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from phalanx.core.errors import EnvironmentProblem
from phalanx.core.files import create_regular_file

FAILING_DISK_VARIABLE = "FAILING_DISK"
"""The control file, which the library maps."""
_NUMBERS = struct.Struct("ll")
MAX_PATH_BYTES = 4000


def create_control_file(control: Path) -> None:
    """Make a control file by which nothing fails and nothing takes longer."""
    with create_regular_file(control) as file:
        file.write(bytes(_NUMBERS.size + MAX_PATH_BYTES))


def fail_writes_below(folder: Path, *, error: int = 0, delay_ms: int = 0) -> None:
    """From now on let each write and fsync of a file or directory at or below `folder`, by any
    process of this run, take `delay_ms` longer, and then fail with `error` (an errno; 0: it is
    done).

    Raises EnvironmentProblem where no library stands before these calls.
    """
    path = os.environ.get(FAILING_DISK_VARIABLE)
    if path is None:
        raise EnvironmentProblem(
            "this fault has the calls of a run's own processes fail, and nothing stands before"
            " them",
            fix="run it by phalanx drill",
        )
    name = os.fsencode(os.path.realpath(folder))
    # In place: the processes have mapped this file, and not another one of its name.
    with open(path, "r+b", buffering=0) as file:
        # The folder first: with the numbers it takes effect.
        file.seek(_NUMBERS.size)
        file.write(name.ljust(MAX_PATH_BYTES, b"\0"))
        file.seek(0)
        file.write(_NUMBERS.pack(error, delay_ms))
