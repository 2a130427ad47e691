"""Which steady clock a process reads, and what it showed when the process was started."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

from phalanx.core.digest import digest
from phalanx.core.process_stat import read_start_ticks


@functools.cache
def build_monotonic_clock_id() -> str:
    """Equal for processes whose monotonic clock is the same one: of one boot, and of one time
    namespace.

    "" where the system does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        # A kernel without time namespaces (before Linux 5.6).
        namespace = ""
    if boot:
        return digest([boot, namespace])
    return ""


def read_process_start_s() -> float:
    """The monotonic clock when this process was started, before its interpreter imported anything.

    Now, where the system does not say.
    """
    now_s = time.monotonic()
    ticks = read_start_ticks("self")
    if ticks is None:
        # No Linux.
        return now_s
    # Start times count from boot, with the time that the machine was suspended.
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return now_s - max(0.0, age_s)
