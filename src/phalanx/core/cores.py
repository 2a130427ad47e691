"""The processor cores of this machine that a process may use."""

from __future__ import annotations

import os


def count_allowed_cores() -> int:
    """Cores that this process may run on, which a scheduler may have limited."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    # Elsewhere than on Linux nothing tells of such limits.
    return os.cpu_count() or 1
