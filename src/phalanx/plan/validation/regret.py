"""How much slower than the measured best the layout is that prediction would have chosen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.plan.timing.setup import StepSetup
from phalanx.plan.validation.run import MANY_GPUS, MeasuredRun

MIN_LAYOUTS_PER_GROUP = 3
SMALL_REGRET, FAIR_REGRET = 0.02, 0.05


@dataclass(frozen=True)
class RegretStats:
    """Over groups of runs that differ in their layout alone: how often, and by how much, the
    predicted best is not the measured best. Fractions."""

    num_groups: int
    median: float | None
    max: float | None
    share_within_2_percent: float | None
    share_within_5_percent: float | None
    num_large_groups: int
    """Groups of at least 64 GPUs."""
    large_share_within_2_percent: float | None


def measure_regret(runs: Sequence[MeasuredRun], predicted: npt.NDArray[np.float64]) -> RegretStats:
    """The regret over all groups of at least three layouts."""
    groups: dict[str, list[int]] = defaultdict(list)
    for row, run in enumerate(runs):
        # What the row leaves open is no layout that somebody could choose.
        if len(run.setups) == 1:
            groups[run.group].append(row)
    regrets, of_large = [], []
    for rows in groups.values():
        by_setup: dict[StepSetup, list[int]] = defaultdict(list)
        for row in rows:
            by_setup[runs[row].setups[0]].append(row)
        if len(by_setup) < MIN_LAYOUTS_PER_GROUP:
            continue
        chosen = min(by_setup.values(), key=lambda same: predicted[same[0]])
        fastest = min(runs[row].step_s for row in rows)
        regret = float(np.median([runs[row].step_s for row in chosen])) / fastest - 1
        regrets.append(regret)
        if runs[rows[0]].num_gpus >= MANY_GPUS:
            of_large.append(regret)
    return RegretStats(
        num_groups=len(regrets),
        median=float(np.median(regrets)) if regrets else None,
        max=max(regrets, default=None),
        share_within_2_percent=_share_of_regrets_within(regrets, SMALL_REGRET),
        share_within_5_percent=_share_of_regrets_within(regrets, FAIR_REGRET),
        num_large_groups=len(of_large),
        large_share_within_2_percent=_share_of_regrets_within(of_large, SMALL_REGRET),
    )


def _share_of_regrets_within(regrets: Sequence[float], limit: float) -> float | None:
    if not regrets:
        return None
    return sum(regret <= limit for regret in regrets) / len(regrets)
