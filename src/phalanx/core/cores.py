"""The processor cores of this machine that a process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

from phalanx.core.cgroups import list_cgroups_around, read_cgroup_text


def count_allowed_cores() -> int:
    """Cores that this process may run on, which a scheduler may have limited."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    # Elsewhere than on Linux nothing tells of such limits.
    return os.cpu_count() or 1


def read_cpu_quota(*places: Path) -> float:
    """Seconds of processors per second that cgroups leave this process and those beside it (what
    `docker run --cpus` sets); infinity without a limit, and where nobody says.

    `places`: in tests, in place of /proc/self/cgroup and /sys/fs/cgroup.
    """
    return min(map(_read_quota_of, list_cgroups_around("cpu", *places)), default=math.inf)


def _read_quota_of(cgroup: Path) -> float:
    words = read_cgroup_text(cgroup / "cpu.max").split()
    if not words:
        # Version 1 has a file for each.
        files = (cgroup / "cpu.cfs_quota_us", cgroup / "cpu.cfs_period_us")
        words = [word for file in files for word in read_cgroup_text(file).split()]
    try:
        quota_us, period_us = (int(word) for word in words)
    except ValueError:
        # "max", or nothing.
        return math.inf
    return quota_us / period_us if quota_us > 0 and period_us > 0 else math.inf
