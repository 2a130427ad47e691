"""Which losses of a run are spikes, and what is done about them, by definition. Standard library
alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

WINDOW, LEAST = 128, 32
DEVIATIONS, LEAST_RISE, IN_A_ROW = 6.0, 0.1, 3
# Standard deviations per median absolute deviation, of a normal distribution.
DEVIATION_OF_MAD = 1.4826

APPLY, SKIP, ROLL_BACK = "apply", "skip", "roll back"


def decide_on_losses(losses: Sequence[float], *, may_roll_back: bool) -> list[str]:
    """What becomes of the update of each step, up to the one in which the run goes back.

    A loss is a spike if there are LEAST ordinary ones before it, and it is above the median of the
    last WINDOW of these by more than a tenth of it and by more than DEVIATIONS standard deviations.
    The IN_A_ROW-th spike in a row sends the run back; where it may not, that level is ordinary from
    then on.
    """
    decisions: list[str] = []
    ordinary: list[float] = []
    num_spikes = 0
    for loss in losses:
        if not _is_spike(loss, ordinary[-WINDOW:]):
            ordinary.append(loss)
            num_spikes = 0
            decisions.append(APPLY)
            continue
        num_spikes += 1
        if num_spikes < IN_A_ROW:
            decisions.append(SKIP)
        elif may_roll_back:
            return [*decisions, ROLL_BACK]
        else:
            ordinary, num_spikes = [loss], 0
            decisions.append(APPLY)
    return decisions


def _is_spike(loss: float, ordinary: Sequence[float]) -> bool:
    if len(ordinary) < LEAST:
        return False
    median = statistics.median_high(ordinary)
    rise = loss - median
    deviation = DEVIATION_OF_MAD * statistics.median_high([abs(x - median) for x in ordinary])
    return rise > LEAST_RISE * abs(median) and rise > DEVIATIONS * deviation
