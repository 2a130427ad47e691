"""What /proc says of a process or a thread in `stat` and `status` (proc(5))."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessStat:
    """`state`: the kernel's letter ("R", "S", "T", ...). `cpu_s`: processor seconds so far, of all
    threads in a process. `start_ticks`: when it started, in clock ticks since boot; with its number
    this tells a process from a later one that got the number."""

    state: str
    cpu_s: float
    start_ticks: int

    @property
    def has_ended(self) -> bool:
        """True for one that only waits until its parent asks for its exit code."""
        return self.state in ("Z", "X")


def read_process_stat(pid: int | str, thread: int | None = None) -> ProcessStat | None:
    """The stat of process `pid` ("self": this one), or of its thread with number `thread`.

    None where there is none, where the system has no /proc, or where it cannot be read.
    """
    try:
        return read_process_stat_or_raise(pid, thread)
    except OSError:
        return None


def read_process_stat_or_raise(pid: int | str, thread: int | None = None) -> ProcessStat | None:
    """As `read_process_stat`, but raises OSError where it may be there and cannot be read."""
    path = Path(f"/proc/{pid}/stat")
    if thread is not None:
        path = Path(f"/proc/{pid}/task/{thread}/stat")
    try:
        # The name, in parentheses, may hold spaces and parentheses itself.
        fields = path.read_bytes().rpartition(b")")[2].split()
        # Fields 14, 15 and 22, where the split begins with field 3.
        ticks = int(fields[11]) + int(fields[12])
        return ProcessStat(fields[0].decode(), ticks / os.sysconf("SC_CLK_TCK"), int(fields[19]))
    except (FileNotFoundError, ProcessLookupError, ValueError, IndexError):
        return None


def read_start_ticks(pid: int | str) -> int | None:
    """When a process started, in clock ticks since boot; None where there is none."""
    stat = read_process_stat(pid)
    return stat.start_ticks if stat is not None else None


def read_state_letter(pid: int) -> str:
    """The kernel's letter for what the main thread of a process does; empty where there is none."""
    stat = read_process_stat(pid)
    return stat.state if stat is not None else ""


def read_run_and_delay_s(pid: int, thread: int | None = None) -> tuple[float, float]:
    """Seconds for which a thread of a process (its main thread where none is named) ran, and for
    which it wanted to and might not: it waited for its turn, or its cgroup was throttled. Zeros
    where the kernel does not say."""
    try:
        words = Path(f"/proc/{pid}/task/{thread or pid}/schedstat").read_text().split()
        return int(words[0]) / 1e9, int(words[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0, 0.0


class ProcessorDelayReader:
    """Reads how long the main thread of this process has wanted a processor and had none, in a
    microsecond or two: fit for every step."""

    def __init__(self) -> None:
        pid = os.getpid()
        # Kept open: a reading is one system call.
        self._schedstat: int | None = None
        try:
            self._schedstat = os.open(
                f"/proc/{pid}/task/{pid}/schedstat", os.O_RDONLY | os.O_CLOEXEC
            )
        except OSError:
            # No Linux, or a kernel that does not count it.
            return
        weakref.finalize(self, os.close, self._schedstat)

    def read_delay_s(self) -> float:
        """Seconds so far; 0 where the kernel does not say."""
        if self._schedstat is None:
            return 0.0
        try:
            return int(os.pread(self._schedstat, 128, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0


def has_signal_handler(pid: int | str, number: int) -> bool:
    """True if a process ("self": this one) has a handler for a signal, of whatever language; False
    where the system does not say."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False
    for line in status.splitlines():
        if line.startswith(b"SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
