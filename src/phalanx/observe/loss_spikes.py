"""Finds losses that jump: far above what the run's own last steps say is ordinary."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

WINDOW_STEPS = 128
MIN_STEPS = 32  # before that, the losses of a run fall too fast to say what is ordinary
NUM_DEVIATIONS = 6.0
# In a row: it is not the batch, but the weights are damaged, or this is a new level.
SPIKES_TO_ROLL_BACK = 3
MIN_RELATIVE_RISE = 0.1
_DEVIATION_OF_MAD = 1.4826  # standard deviations per median absolute deviation, of a normal


class LossSpikeDetector:
    """Judges each loss of a run by the `WINDOW_STEPS` before it.

    Median and median absolute deviation, which single spikes do not move (mean and standard
    deviation would take the first spike for ordinary). A level that stays is ordinary after half a
    window.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)

    def add_loss(self, loss: float) -> float | None:
        """The median of the steps before if `loss` is a spike, else None.

        A loss that is not finite is no spike, and is left out: skipped steps are told by their own
        event.
        """
        if not math.isfinite(loss):
            return None
        median = self.judge_loss(loss)
        self._losses.append(loss)
        return median

    def judge_loss(self, loss: float) -> float | None:
        """Judge `loss` as `add_loss` does, but do not count it among those of the steps before."""
        if not math.isfinite(loss) or len(self._losses) < MIN_STEPS:
            return None
        return self._find_exceeded_median(loss)

    def forget(self) -> None:
        """Begin anew: ranks that go back to a checkpoint go back to its loss, too."""
        self._losses.clear()

    def _find_exceeded_median(self, loss: float) -> float | None:
        median = _find_median(self._losses)
        # Most steps are below the median or near it: the deviations are computed for the rest.
        if loss - median <= MIN_RELATIVE_RISE * abs(median):
            return None
        deviation = _DEVIATION_OF_MAD * _find_median(abs(each - median) for each in self._losses)
        if loss - median <= NUM_DEVIATIONS * deviation:
            return None
        return median


def _find_median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
