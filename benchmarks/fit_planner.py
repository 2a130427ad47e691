"""Fits the time model's constants to measured runs, between their bounds and near their priors.

    python benchmarks/fit_planner.py            # writes constants.toml of phalanx.plan.timing
    python benchmarks/fit_planner.py --leave-one-out   # writes docs/planner-validation.md

A residual is the logarithm of predicted over measured seconds. Sources count nearly alike, however
many rows they have, and most of what all rows of one source have in common is left out: sites
differ, and that is what anchors are for. Needs scipy (of the dev extra).
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

import planner_page
from phalanx.plan.timing.constants import (
    TimingConstants,
    list_timing_constants,
    load_timing_constants,
)
from phalanx.plan.validation.predict import RunBatch, group_runs, predict_runs
from phalanx.plan.validation.rows import load_row_file
from phalanx.plan.validation.run import MeasuredRun

Array = npt.NDArray[np.float64]
ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "benchmarks" / "published"
CONSTANTS = ROOT / "src" / "phalanx" / "plan" / "timing" / "constants.toml"
NOT_FITTED = (
    "fp32_efficiency",
    "host_gb_s",
    "host_adam_gb_s",
    "graph_gap_s",
    "launch_ordered",
    "link_hop_s",
    "small_head_efficiency_cudnn",
    "fp8_attention_speedup",
    "band",
    "band_experts",
    "band_waiting",
    "anchored_band",
    "anchored_band_experts",
)  # no row moves them, or too few
SOURCE_SHARE = 0.6  # of what a source's rows have in common, how much is left out
PRIOR_WIDTH = 0.35  # standard deviation of a prior, as a part of the distance between its bounds
PRIOR_WEIGHT = 1.0
ROW_SIGMA = 0.08  # beyond this error, rows count less than quadratically
MOST_ROWS = 180  # of one source in a fit
STEP = 0.01  # of a finite difference, as a part of the distance between bounds


class Fit:
    """Runs, and the constants that are fitted to them."""

    def __init__(self, runs: Sequence[MeasuredRun], names: Sequence[str] | None = None) -> None:
        self.runs = list(runs)
        specs = list_timing_constants()
        self.names = list(names or [name for name in specs if name not in NOT_FITTED])
        self.low = np.array([specs[name].low for name in self.names])
        self.high = np.array([specs[name].high for name in self.names])
        self.prior = self.scale_to_unit(np.array([specs[name].prior for name in self.names]))
        self.batches: list[RunBatch] = group_runs(self.runs)
        self.measured = np.array([run.step_s for run in self.runs])
        sources = [run.source for run in self.runs]
        self.source_of = np.unique(sources, return_inverse=True)[1]

    def scale_to_unit(self, values: Array) -> Array:
        return (values - self.low) / (self.high - self.low)

    def build_constants(self, unit: Array) -> TimingConstants:
        """Constants for positions between bounds, 0 to 1; a matrix of them makes columns."""
        values = {
            key.name: getattr(load_timing_constants(), key.name) for key in fields(TimingConstants)
        }
        for index, name in enumerate(self.names):
            value = self.low[index] + unit[..., index] * (self.high[index] - self.low[index])
            values[name] = value[..., None] if unit.ndim > 1 else float(value)
        return TimingConstants(**values)

    def log_errors(self, unit: Array) -> Array:
        """The logarithm of predicted over measured seconds of every run."""
        predicted, _ = predict_runs(self.batches, self.build_constants(unit))
        return np.log(predicted / self.measured)

    def differentiate(self, unit: Array) -> tuple[Array, Array]:
        """The logarithmic errors, and their derivatives by each constant."""
        num = len(self.names)
        step = np.where(unit > 0.5, -STEP, STEP)
        points = np.vstack([unit, unit + np.diag(step)])
        errors = self.log_errors(points)
        return errors[0], ((errors[1:] - errors[0]) / step[:num, None]).T

    def run(
        self, train: npt.NDArray[np.bool_], start: Array | None = None, steps: int = 8
    ) -> Array:
        """The constants, in units, that fit the rows of `train` best."""
        cache: dict[bytes, tuple[Array, Array]] = {}
        whiten = self.build_whitener(train)

        def look_up(unit: Array) -> tuple[Array, Array]:
            key = unit.tobytes()
            if key not in cache:
                cache[key] = self.differentiate(unit)
            return cache[key]

        def residuals(unit: Array) -> Array:
            errors = look_up(unit)[0][train]
            prior = PRIOR_WEIGHT * (unit - self.prior) / PRIOR_WIDTH
            return np.concatenate([soften(whiten(errors)[0]), prior])

        def jacobian(unit: Array) -> Array:
            errors, derivatives = look_up(unit)
            values, _ = whiten(errors[train])
            by_constant = whiten(derivatives[train])[0]
            softened = by_constant * soften_slope(values)[:, None]
            return np.vstack([softened, np.eye(len(unit)) * PRIOR_WEIGHT / PRIOR_WIDTH])

        start = self.prior if start is None else start
        result = least_squares(
            residuals, np.clip(start, 0.005, 0.995), jacobian, bounds=(0.0, 1.0), max_nfev=steps
        )
        return np.asarray(result.x)

    def build_whitener(self, train: npt.NDArray[np.bool_]) -> Any:
        """A function that weighs rows so that sources count alike, and leaves most of what a
        source's rows have in common out."""
        source = self.source_of[train]
        counts = np.bincount(source, minlength=source.max() + 1).astype(float)
        # Twenty rows say more than one, but not twenty times as much.
        weight = (np.minimum(counts, 60.0) ** 0.5 / np.maximum(counts, 1.0))[source] ** 0.5
        sums = np.zeros((len(counts), len(source)))
        sums[source, np.arange(len(source))] = 1.0

        def whiten(values: Array) -> tuple[Array, Array]:
            means = (sums @ values) / np.maximum(counts, 1.0).reshape(-1, *[1] * (values.ndim - 1))
            centred = values - SOURCE_SHARE * means[source]
            scale = weight.reshape(-1, *[1] * (values.ndim - 1)) / ROW_SIGMA
            return centred * scale, weight

        return whiten


def soften(values: Array) -> Array:
    """Residuals whose square grows as their absolute value does where they are large."""
    return np.sign(values) * np.sqrt(2.0 * (np.sqrt(1.0 + values**2) - 1.0))


def soften_slope(values: Array) -> Array:
    """The derivative of `soften`."""
    root = np.sqrt(1.0 + values**2)
    softened = np.sqrt(2.0 * (root - 1.0))
    return np.where(softened < 1e-6, 1.0, np.abs(values) / (root * np.maximum(softened, 1e-6)))


def thin_out(runs: Sequence[MeasuredRun]) -> npt.NDArray[np.bool_]:
    """Which runs a fit looks at: of sources with hundreds of rows, evenly chosen ones."""
    seen: dict[str, int] = defaultdict(int)
    counts = Counter(run.source for run in runs)
    chosen = np.zeros(len(runs), dtype=np.bool_)
    for row, run in enumerate(runs):
        every = -(-counts[run.source] // MOST_ROWS)
        chosen[row] = seen[run.source] % every == 0
        seen[run.source] += 1
    return chosen


def load_runs() -> list[MeasuredRun]:
    runs: list[MeasuredRun] = []
    for path in sorted(PUBLISHED.glob("runs*.jsonl")):
        runs += load_row_file(path).runs
    return runs


def write_constants(values: dict[str, float]) -> None:
    """Puts `values` into the table of constants, and leaves the rest of it as it is."""
    text = CONSTANTS.read_text()
    for name, value in values.items():
        pattern = rf"(\[{name}\]\nvalue = )\S+"
        text = re.sub(pattern, lambda match, value=value: f"{match[1]}{value:.4g}", text)
    CONSTANTS.write_text(text)


class LeaveOneOut:
    """Constants fitted without one source, for each, from the derivatives at the fit to all.

    The residuals are solved as linear in the constants, within bounds; where the true ones do not
    get smaller by it, half of the step is taken, and half of that.
    """

    def __init__(self, fit: Fit, unit: Array) -> None:
        self.fit, self.start = fit, unit
        self.errors, self.derivatives = fit.differentiate(unit)
        self.chosen = thin_out(fit.runs)

    def fit_without(self, rows: npt.NDArray[np.bool_]) -> Array:
        """The constants, in units, of a fit that never saw `rows`."""
        train = self.chosen & ~rows
        whiten = self.fit.build_whitener(train)
        errors, derivatives = self.errors[train], self.derivatives[train]
        by_constant = whiten(derivatives)[0]

        def residuals(unit: Array) -> Array:
            moved = errors + derivatives @ (unit - self.start)
            prior = PRIOR_WEIGHT * (unit - self.fit.prior) / PRIOR_WIDTH
            return np.concatenate([soften(whiten(moved)[0]), prior])

        def jacobian(unit: Array) -> Array:
            values = whiten(errors + derivatives @ (unit - self.start))[0]
            prior = np.eye(len(unit)) * PRIOR_WEIGHT / PRIOR_WIDTH
            return np.vstack([by_constant * soften_slope(values)[:, None], prior])

        inside = np.clip(self.start, 0.001, 0.999)
        solved = least_squares(residuals, inside, jacobian, bounds=(0.0, 1.0)).x
        best, lowest = self.start, float((residuals(self.start) ** 2).sum())
        for share in (1.0, 0.5, 0.25):
            unit = self.start + share * (solved - self.start)
            softened = soften(whiten(self.fit.log_errors(unit)[train])[0])
            prior = PRIOR_WEIGHT * (unit - self.fit.prior) / PRIOR_WIDTH
            objective = float((softened**2).sum() + (prior**2).sum())
            if objective < lowest:
                return unit
        return best

    def predict_all(self) -> Array:
        """Seconds of every run by constants that never saw its source."""
        seconds = np.zeros(len(self.fit.runs))
        sources = np.array([run.source for run in self.fit.runs])
        for number, source in enumerate(dict.fromkeys(sources)):
            rows = sources == source
            constants = self.fit.build_constants(self.fit_without(rows))
            of_source = [run for run in self.fit.runs if run.source == source]
            seconds[rows], _ = predict_runs(group_runs(of_source), constants)
            print(f"{number + 1:3d}  {source}", flush=True)
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--leave-one-out", action="store_true", help="and write the page")
    parser.add_argument("--keep-constants", action="store_true", help="do not fit to all rows")
    arguments = parser.parse_args()
    fit = Fit(load_runs())
    unit = fit.scale_to_unit(
        np.array([getattr(load_timing_constants(), name) for name in fit.names])
    )
    if not arguments.keep_constants:
        unit = fit.run(thin_out(fit.runs), start=unit)
        constants = fit.build_constants(unit)
        write_constants({name: getattr(constants, name) for name in fit.names})
    if arguments.leave_one_out:
        seconds = LeaveOneOut(fit, unit).predict_all()
        write_constants(planner_page.fit_bands(fit.runs, seconds))
        list_timing_constants.cache_clear()
        load_timing_constants.cache_clear()
        planner_page.write_page(fit.runs, seconds, len(fit.names))


if __name__ == "__main__":
    main()
