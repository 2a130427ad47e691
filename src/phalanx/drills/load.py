"""The load of the machine while a run of a drill goes on: the times of a trial are judged beside
it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from phalanx.core.files import open_regular_file

_SAMPLE_INTERVAL_S = 0.2


class LoadMeter:
    """Samples how many threads of the machine run or want to, those of the run among them, but not
    the one that asks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = clock()
        self._counts: list[int] = []

    def sample(self) -> None:
        """Take a sample if the next one is due."""
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _SAMPLE_INTERVAL_S
        count = _read_num_runnable()
        if count is not None:
            self._counts.append(count - 1)

    @property
    def mean(self) -> float | None:
        """The mean of all samples; None where the system does not say."""
        if not self._counts:
            return None
        return round(sum(self._counts) / len(self._counts), 2)


def average_loads(loads: Sequence[tuple[float | None, float]]) -> float | None:
    """The load over several commands, each with its seconds; None where one is not known."""
    total_s = sum(seconds for _, seconds in loads)
    known = [load * seconds for load, seconds in loads if load is not None]
    if len(known) < len(loads) or total_s <= 0:
        return None
    return round(sum(known) / total_s, 2)


def _read_num_runnable() -> int | None:
    try:
        with open_regular_file("/proc/loadavg") as file:
            # "0.61 0.48 0.40 3/131 4711": threads that run or want to, of all.
            return int(file.read().split()[3].partition(b"/")[0])
    except (OSError, ValueError, IndexError):
        return None
