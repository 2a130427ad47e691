"""The clock of saves: one is due by time, or by what saves cost and how often the job fails."""

from __future__ import annotations

import math
import statistics
from collections import deque

from phalanx.job.schema import Checkpoint
from phalanx.observe.events import CheckpointIntervalChosen

# The first save of every = "auto" comes this early, to be measured.
FIRST_AUTO_STEPS, FIRST_AUTO_S = 10, 60.0
NUM_AVERAGED_SAVES = 5
# A change of the interval by this factor is an event.
NOTABLE_INTERVAL_RATIO = 1.25


def compute_optimal_save_interval_s(stall_s: float, save_s: float, mtbf_s: float) -> float:
    """Seconds between saves that lose the least time: a save that stops training for `stall_s`
    against what is done again after a failure each `mtbf_s`.

    Never shorter than `save_s`, which a save takes.

    Young, "A first order approximation to the optimum checkpoint interval" (1974); Daly (2006)
    shows that it is good where `stall_s` is small beside `mtbf_s`.
    """
    # Young's T = sqrt(2 * C * M), with C the seconds of a save and M the mean time to a failure.
    return max(math.sqrt(2 * stall_s * mtbf_s), save_s)


class SaveClock:
    """Rank 0's clock, which tells when a save is due by time. Seconds are monotonic."""

    def __init__(self, options: Checkpoint, now_s: float) -> None:
        self.interval_s: float | None = None
        """Seconds between saves with every = "auto"; None until a save has been measured."""
        self._options = options
        self._began_s = self._last_s = now_s
        self._costs: deque[tuple[float, float]] = deque(maxlen=NUM_AVERAGED_SAVES)
        self._reported_s = math.nan

    def is_due(self, num_steps: int, now_s: float) -> bool:
        """True if a save is due by time; `num_steps` were done since the clock was started."""
        minutes = self._options.every_minutes
        if minutes is not None and now_s - self._last_s >= minutes * 60:
            return True
        if self._options.every is None:
            return False
        if self.interval_s is None:
            return num_steps >= FIRST_AUTO_STEPS or now_s - self._began_s >= FIRST_AUTO_S
        return now_s - self._last_s >= self.interval_s

    def restart(self, now_s: float) -> None:
        """Count from `now_s` on: a save has begun."""
        self._last_s = now_s

    def record_save_cost(
        self, step: int, stall_s: float, save_s: float
    ) -> CheckpointIntervalChosen | None:
        """Take in the cost of a save; returns an event if the interval is new or another one.

        The median of the last few costs counts: the first save also pays for memory that later ones
        find.
        """
        if self._options.every is None or self._options.mtbf_hours is None:
            return None
        self._costs.append((stall_s, save_s))
        stall_s, save_s = (statistics.median(column) for column in zip(*self._costs, strict=True))
        mtbf_s = self._options.mtbf_hours * 3600
        self.interval_s = compute_optimal_save_interval_s(stall_s, save_s, mtbf_s)
        # NaN at first: each comparison with it is False, so the first interval is reported.
        if 1 / NOTABLE_INTERVAL_RATIO < self.interval_s / self._reported_s < NOTABLE_INTERVAL_RATIO:
            return None
        self._reported_s = self.interval_s
        return CheckpointIntervalChosen(step, self.interval_s, stall_s, save_s, mtbf_s)
