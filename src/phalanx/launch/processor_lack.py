"""How long processes that have something to do were kept from it by the lack of a processor: a
deadline for their work waits for so much longer."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from phalanx.core.process_stat import read_process_stat, read_run_and_delay_s

# Each look reads two files for each thread of each process.
LOOK_INTERVAL_S = 0.2


@dataclass(frozen=True)
class _ThreadLook:
    """Seconds that a thread ran and was kept waiting by now, and whether it runs or wants to."""

    run_s: float
    delay_s: float
    is_runnable: bool


class ProcessorLack:
    """Sums up the time in which one process or more wanted a processor and had none: those who wait
    for each other lose it one after the other."""

    def __init__(self, pids: Collection[int], now_s: float) -> None:
        self._looked_s = now_s
        self._looks = {pid: _look_at_threads(pid) for pid in pids}
        self.total_s = 0.0

    def look(self, pids: Collection[int], now_s: float) -> None:
        """Count what went by since the last look, if the next one is due. `pids`: the processes
        that have something to do."""
        elapsed_s = now_s - self._looked_s
        if elapsed_s < LOOK_INTERVAL_S:
            return
        looks = {pid: _look_at_threads(pid) for pid in pids}
        lack_s = 0.0
        for pid, threads in looks.items():
            lack_s = max(lack_s, _find_longest_lack_s(self._looks.get(pid, {}), threads, elapsed_s))
        self.total_s += min(lack_s, elapsed_s)
        self._looks, self._looked_s = looks, now_s


def _look_at_threads(pid: int) -> dict[int, _ThreadLook]:
    """A look at each thread of a process; none where the process is gone or cannot be read."""
    try:
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return {}
    looks = {}
    for thread in threads:
        stat = read_process_stat(pid, thread)
        is_runnable = stat is not None and stat.state == "R"
        looks[thread] = _ThreadLook(*read_run_and_delay_s(pid, thread), is_runnable)
    return looks


def _find_longest_lack_s(
    before: Mapping[int, _ThreadLook], after: Mapping[int, _ThreadLook], elapsed_s: float
) -> float:
    longest_s = 0.0
    for thread, now in after.items():
        last = before.get(thread, _ThreadLook(0.0, 0.0, False))
        lack_s = now.delay_s - last.delay_s
        if last.is_runnable and now.is_runnable and now.run_s == last.run_s:
            # The kernel counts a wait only when it is over.
            lack_s = elapsed_s
        longest_s = max(longest_s, lack_s)
    return longest_s
