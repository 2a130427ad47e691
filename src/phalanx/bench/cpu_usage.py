"""How much of the machine other programs use while something is measured. Torch-free."""

from __future__ import annotations

import time

import psutil


class CpuUsage:
    """The processor time of this machine from now on, and this process's part of it."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._busy_s, self._own_s = _read_busy_cpu_seconds(), time.process_time()

    def own_cpu_seconds(self) -> float:
        """Processor seconds of this process, all its threads."""
        return time.process_time() - self._own_s

    def compute_share_of_others(self, own_s: float) -> float:
        """The share of all cores, 0 to 1, that was used, less `own_s` processor seconds."""
        wall_s = time.monotonic() - self._began_s
        others_s = _read_busy_cpu_seconds() - self._busy_s - own_s
        return max(0.0, min(1.0, others_s / max(1e-9, wall_s * (psutil.cpu_count() or 1))))


def measure_share_of_other_programs(seconds: float) -> float:
    """The share of all cores, 0 to 1, that other programs use while this process waits for
    `seconds`."""
    usage = CpuUsage()
    time.sleep(seconds)
    return usage.compute_share_of_others(usage.own_cpu_seconds())


def _read_busy_cpu_seconds() -> float:
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    # Guests' seconds are in those of users already.
    guests_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return float(sum(times) - guests_s - idle_s)
