"""The memory that processes share (/dev/shm) is full, and then a rank is killed: the one that takes
its place finds no room for what it shares."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from phalanx.core.files import create_regular_file
from phalanx.resilience.expectation import Expectation
from phalanx.resilience.own_mounts import require_own_mounts

EXPECTATION = Expectation(verdict="killed", stage="small_shared_memory", says="/dev/shm has")
FILLER = Path("/dev/shm/filler")


def inject() -> None:
    """Fill the run's own /dev/shm to the last byte, for the rest of the run, and SIGKILL to this
    process.

    What it shared is free again then, and less than the ranks of a machine need together. The real
    condition: a small file system of memory that the drill has mounted there for the run alone.
    Raises EnvironmentProblem where the run shares its mounts with others.
    """
    require_own_mounts()
    with create_regular_file(FILLER, buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    os.kill(os.getpid(), signal.SIGKILL)
