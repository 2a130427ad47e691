"""A cgroup with a quota of processor time, which a drill makes for a run, and into which a fault
moves processes of it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx.core.errors import EnvironmentProblem

CPU_QUOTA_VARIABLE = "PHALANX_DRILL_CPU_QUOTA"
"""The cgroup (version 1) of a run's drill."""
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CONTROLLER = "cpu"


def throttle_for_seconds(pids: Sequence[int], seconds: float) -> None:
    """Move processes into the cgroup with the quota; after so many seconds back into that which
    this one is in now. Returns at once.

    Raises EnvironmentProblem where no drill has made a cgroup.
    """
    cgroup = os.environ.get(CPU_QUOTA_VARIABLE)
    if cgroup is None:
        raise EnvironmentProblem(
            "this fault needs a cgroup with a quota of processor time, and the run has none",
            fix="run it by phalanx drill",
        )
    quota, own = Path(cgroup), _find_own_cgroup(Path(cgroup).parent)
    for pid in pids:
        _move(pid, quota)

    def wait_and_move_back() -> None:
        time.sleep(seconds)
        for pid in pids:
            _move(pid, own)

    threading.Thread(target=wait_and_move_back, daemon=True).start()


def _move(pid: int, cgroup: Path) -> None:
    # It may have ended.
    with contextlib.suppress(ProcessLookupError):
        (cgroup / "cgroup.procs").write_text(str(pid))


def _find_own_cgroup(mount: Path) -> Path:
    for line in _OWN_CGROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if _CONTROLLER in controllers.split(","):
            return mount / path.lstrip("/")
    return mount
