"""What the kernel says of a rank's process: running, waiting, stopped or gone, and how much of a
core it gets."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.black_box import read_boot_id
from phalanx.core.black_box_reader import BoxHeader
from phalanx.core.process_stat import read_process_stat, read_process_stat_or_raise

# Long enough for several ticks of the kernel's clock, which counts CPU time in hundredths.
SAMPLE_S = 0.3
# The kernel's letters, in words.
PROCESS_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device",
    "I": "sleeping",
    "T": "stopped",
    "t": "traced",
    "Z": "gone",
    "X": "gone",
}


@dataclass(frozen=True)
class ProcessStatus:
    """The activity of a process.

    `state`: "running", "sleeping", "waiting for a device", "stopped" (by a signal, whichever),
    "traced" (by a debugger), "gone", or "unknown" (on another machine, a box without a process, or
    one that cannot be looked at). `cpu_share`: cores that all its threads used while it was looked
    at; `throttled_share`: part of that time in which its cgroup was not allowed to run. None where
    not measured.
    """

    state: str
    cpu_share: float | None = None
    throttled_share: float | None = None

    @property
    def is_halted(self) -> bool:
        """True for a process that does nothing until something is done to it."""
        return self.state in ("stopped", "traced", "gone")


@dataclass(frozen=True)
class _CpuSample:
    monotonic_s: float
    cpu_s: float | None
    throttled_s: float | None


def read_process_statuses(
    headers: Mapping[int, BoxHeader | None], sample_s: float = SAMPLE_S
) -> dict[int, ProcessStatus]:
    """The status of each rank's process, by rank; takes `sample_s` if any of them runs here."""
    states: dict[int, str] = {}
    before: dict[int, _CpuSample] = {}
    for rank, header in headers.items():
        states[rank] = _read_state(header)
        if header is not None and states[rank] not in ("unknown", "gone"):
            before[rank] = _sample_cpu(header.pid)
    if before:
        time.sleep(sample_s)
    statuses = {}
    for rank, state in states.items():
        cpu_share = throttled_share = None
        header = headers[rank]
        if header is not None and rank in before:
            cpu_share, throttled_share = _compare_samples(before[rank], _sample_cpu(header.pid))
        statuses[rank] = ProcessStatus(state, cpu_share, throttled_share)
    return statuses


def _read_state(header: BoxHeader | None) -> str:
    if header is None or header.pid <= 0 or header.host != socket.gethostname():
        return "unknown"
    if header.boot_id != read_boot_id():
        # The same name: another machine, or this one before it was started again.
        return "unknown"
    try:
        stat = read_process_stat_or_raise(header.pid)
    except OSError:
        # No permission, no descriptor: that says nothing of the process.
        return "unknown"
    if stat is None:
        return "unknown" if is_process_there(header.pid) else "gone"
    if stat.start_ticks != header.start_ticks:
        return "gone"
    return PROCESS_STATES.get(stat.state, "sleeping")


def is_process_there(pid: int) -> bool:
    """True if a process has this number, whether or not /proc shows it to us."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # Another user's.
        return True
    return True


def _sample_cpu(pid: int) -> _CpuSample:
    stat = read_process_stat(pid)
    cpu_s = stat.cpu_s if stat is not None else None
    return _CpuSample(time.monotonic(), cpu_s, _read_throttled_s(pid))


def _read_throttled_s(pid: int) -> float | None:
    """Seconds for which the cgroup (version 2) of a process was throttled so far."""
    try:
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                stat = Path("/sys/fs/cgroup") / line[3:].lstrip("/") / "cpu.stat"
                for entry in stat.read_text().splitlines():
                    name, _, value = entry.partition(" ")
                    if name == "throttled_usec":
                        return int(value) / 1e6
    except (OSError, ValueError):
        pass
    return None


def _compare_samples(before: _CpuSample, after: _CpuSample) -> tuple[float | None, float | None]:
    elapsed_s = after.monotonic_s - before.monotonic_s
    cpu_share = throttled_share = None
    if before.cpu_s is not None and after.cpu_s is not None:
        cpu_share = (after.cpu_s - before.cpu_s) / elapsed_s
    if before.throttled_s is not None and after.throttled_s is not None:
        throttled_share = min(1.0, (after.throttled_s - before.throttled_s) / elapsed_s)
    return cpu_share, throttled_share
