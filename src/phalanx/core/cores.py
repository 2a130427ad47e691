"""The processor cores of this machine that a process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

from phalanx.core.files import read_whole_regular_file

_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def count_allowed_cores() -> int:
    """Cores that this process may run on, which a scheduler may have limited."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    # Elsewhere than on Linux nothing tells of such limits.
    return os.cpu_count() or 1


def read_cpu_quota(own_cgroups: Path = _OWN_CGROUPS, cgroups: Path = _CGROUPS) -> float:
    """Seconds of processors per second that cgroups leave this process and those beside it (what
    `docker run --cpus` sets); infinity without a limit, and where nobody says."""
    quotas = [math.inf]
    for line in _read_text(own_cgroups).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            mount = cgroups
        elif "cpu" in controllers.split(","):
            mount = cgroups / controllers
            if not mount.is_dir():
                mount = cgroups / "cpu"
        else:
            continue
        own = mount / path.lstrip("/")
        # A container may see its own cgroup as the topmost one, whatever it is called outside.
        quotas += [
            _read_quota_of(folder) for folder in (own, *own.parents) if folder.is_relative_to(mount)
        ]
    return min(quotas)


def _read_quota_of(cgroup: Path) -> float:
    words = _read_text(cgroup / "cpu.max").split()
    if not words:
        # Version 1 has a file for each.
        files = (cgroup / "cpu.cfs_quota_us", cgroup / "cpu.cfs_period_us")
        words = [word for file in files for word in _read_text(file).split()]
    try:
        quota_us, period_us = (int(word) for word in words)
    except ValueError:
        # "max", or nothing.
        return math.inf
    return quota_us / period_us if quota_us > 0 and period_us > 0 else math.inf


def _read_text(path: Path) -> str:
    try:
        return read_whole_regular_file(path).decode(errors="replace")
    except OSError:
        return ""
