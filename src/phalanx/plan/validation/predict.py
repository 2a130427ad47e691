"""Predicts runs, many at once: runs of one model and machine are columns of one call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.plan.timing.columns import SetupColumns, build_setup_columns
from phalanx.plan.timing.constants import TimingConstants
from phalanx.plan.timing.setup import StepSetup
from phalanx.plan.timing.step import estimate_step_columns
from phalanx.plan.validation.run import MeasuredRun


@dataclass(frozen=True)
class RunBatch:
    """Runs of one model and machine, with all their setups in one table."""

    first: MeasuredRun
    columns: SetupColumns
    rows: npt.NDArray[np.intp]
    """Positions of the runs in the list that was grouped."""
    starts: npt.NDArray[np.intp]
    """The first setup of each run in `columns`."""


def group_runs(runs: Sequence[MeasuredRun]) -> list[RunBatch]:
    """The runs by model, machine and precision."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for row, run in enumerate(runs):
        # `work` is the same object for equal models: to hash it would go through every block.
        groups[id(run.work), run.machine, run.precision].append(row)
    return [_build_run_batch(runs, rows) for rows in groups.values()]


def _build_run_batch(runs: Sequence[MeasuredRun], rows: list[int]) -> RunBatch:
    setups: list[StepSetup] = []
    starts: list[int] = []
    for row in rows:
        starts.append(len(setups))
        setups.extend(runs[row].setups)
    return RunBatch(runs[rows[0]], build_setup_columns(setups), np.array(rows), np.array(starts))


def predict_runs(
    batches: Sequence[RunBatch], constants: TimingConstants
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Seconds of each run's step, by its position, and half of the logarithm's width of its 80 %
    interval.

    Where a run leaves something open, those of its fastest setup. Where constants are columns, one
    row for each of their values.
    """
    count = sum(len(batch.rows) for batch in batches)
    predicted: npt.NDArray[Any] | None = None
    band = np.zeros(0)
    for batch in batches:
        first = batch.first
        times = estimate_step_columns(
            first.work, first.machine, first.precision, batch.columns, constants
        )
        # The team that published it will have taken the fastest that fitted.
        fastest = np.minimum.reduceat(times.total_s, batch.starts, axis=-1)
        if predicted is None:
            predicted = np.empty((*fastest.shape[:-1], count))
            band = np.empty_like(predicted)
        predicted[..., batch.rows] = fastest
        band[..., batch.rows] = np.maximum.reduceat(times.band, batch.starts, axis=-1)
    return (np.zeros(0), band) if predicted is None else (predicted, band)
