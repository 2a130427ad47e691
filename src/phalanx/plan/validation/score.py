"""Scores predictions of measured runs: errors by source and class, beside a baseline, with what the
80 % interval covered and what choosing a layout by prediction would have cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.plan.timing.constants import TimingConstants, load_timing_constants
from phalanx.plan.validation.predict import group_runs, predict_runs
from phalanx.plan.validation.regret import RegretStats, measure_regret
from phalanx.plan.validation.rows import UsableRows
from phalanx.plan.validation.run import MeasuredRun

Array = npt.NDArray[np.float64]
MIN_ROWS_OF_OWN_SOURCE = 8
POOLED_SOURCE_LABEL = f"sources of fewer than {MIN_ROWS_OF_OWN_SOURCE} rows"
SMALLEST_SCALE, LARGEST_SCALE = 0.6, 1.6
# Logarithmic spreads: of sites around the model, and of runs around their site before any was seen.
SITE_SPREAD, RUN_SPREAD = 0.12, 0.08
MEDIAN_OF_THREE_VARIANCE_RATIO = 1.3  # of the median of three, as a multiple of the mean's
NUM_WORST_ROWS = 10


@dataclass(frozen=True)
class ErrorStats:
    """Relative errors of the step time, as fractions: of |predicted / measured - 1| the median,
    mean, 90th percentile and maximum; of the signed error the median (`bias`); and the share of
    rows inside the 80 % interval."""

    n: int
    median: float
    mean: float
    p90: float
    max: float
    bias: float
    coverage: float | None


@dataclass(frozen=True)
class WorstRow:
    """A row with one of the largest errors."""

    row_id: str
    source: str
    model: str
    gpu: str
    num_gpus: int
    measured_s: float
    predicted_s: float


@dataclass(frozen=True)
class ScoreReport:
    """All that a validation says."""

    num_rows: int
    anchors: int
    """Rows per source that set its scale and are not scored, as asked for."""
    num_anchor_rows: int
    num_capped_sources: int
    """Sources that have fewer anchors than that: half of their rows, the most that are taken."""
    num_inferred: int
    """Scored rows that left recomputation, microbatch or schedule open: the fastest that fits."""
    overall: ErrorStats
    sources: Mapping[str, ErrorStats]
    classes: Mapping[str, ErrorStats]
    baseline: ErrorStats
    """The same rows by one constant utilisation for each GPU and type, taken from these rows."""
    baseline_sources: Mapping[str, ErrorStats]
    memory: ErrorStats | None
    regret: RegretStats
    worst: tuple[WorstRow, ...]
    unusable: Mapping[str, int]

    @property
    def median_of_sources(self) -> float:
        """The median over sources of their median errors."""
        return float(np.median([stats.median for stats in self.sources.values()]))

    def to_json(self) -> dict[str, Any]:
        body = asdict(self)
        return {
            **body,
            "median_of_sources": self.median_of_sources,
        }


@dataclass(frozen=True)
class ScoredRuns:
    """Runs with their predictions, after anchors set the scale of each source."""

    runs: Sequence[MeasuredRun]
    predicted: Array
    band: Array
    """Half of the logarithm's width of each run's 80 % interval."""
    is_anchor: npt.NDArray[np.bool_]

    @property
    def measured_step_s(self) -> Array:
        return np.array([run.step_s for run in self.runs])

    def summarise_selected(self, keep: npt.NDArray[np.bool_]) -> ErrorStats | None:
        """The errors of the runs of `keep` that are no anchors; None where there are none."""
        rows = np.flatnonzero(keep & ~self.is_anchor)
        if not len(rows):
            return None
        log_error = np.log(self.predicted[rows] / self.measured_step_s[rows])
        inside = np.abs(log_error) <= self.band[rows]
        return summarise_errors(np.expm1(log_error), float(inside.mean()))


def summarise_errors(errors: Array, coverage: float | None) -> ErrorStats:
    """The statistics of signed relative errors."""
    size = np.abs(errors)
    return ErrorStats(
        n=len(errors),
        median=float(np.median(size)),
        mean=float(size.mean()),
        p90=float(np.quantile(size, 0.9)),
        max=float(size.max()),
        bias=float(np.median(errors)),
        coverage=coverage,
    )


def label_sources(runs: Sequence[MeasuredRun], pool_small: bool) -> list[str]:
    """The source of each run; those of few rows are one where `pool_small`."""
    counts: dict[str, int] = defaultdict(int)
    for run in runs:
        counts[run.source] += 1
    labels = []
    for run in runs:
        is_small = counts[run.source] < MIN_ROWS_OF_OWN_SOURCE
        labels.append(POOLED_SOURCE_LABEL if pool_small and is_small else run.source)
    return labels


def choose_anchor_rows(rows: npt.NDArray[np.intp], count: int) -> list[int]:
    """`count` of the `rows`, evenly spread over their order in the file, for tables list what is
    alike together; at most half of them. What was measured has no part in it."""
    count = min(count, len(rows) // 2)
    return [int(rows[int((index + 0.5) * len(rows) / count)]) for index in range(count)]


def estimate_log_scale(log_ratios: Array) -> float:
    """The logarithm of a site's scale from those of a few runs: their median, believed the less the
    more they differ, for then it is partly their noise."""
    middle, count = float(np.median(log_ratios)), len(log_ratios)
    squares = 2 * RUN_SPREAD**2 + float(((log_ratios - middle) ** 2).sum())
    variance = squares / (count + 1) / count * MEDIAN_OF_THREE_VARIANCE_RATIO
    log_scale = middle * SITE_SPREAD**2 / (SITE_SPREAD**2 + variance)
    return float(min(max(log_scale, np.log(SMALLEST_SCALE)), np.log(LARGEST_SCALE)))


def apply_anchor_scales(
    runs: Sequence[MeasuredRun], predicted: Array, labels: Sequence[str], count: int
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """The predictions times the scale of each source, and which rows set it."""
    is_anchor = np.zeros(len(runs), dtype=np.bool_)
    scaled = predicted.copy()
    if not count:
        return scaled, is_anchor
    names = np.array(labels)
    measured = np.array([run.step_s for run in runs])
    for name in dict.fromkeys(labels):
        rows = np.flatnonzero(names == name)
        anchors = choose_anchor_rows(rows, count)
        if not anchors:
            continue
        log_ratios = np.log(measured[anchors] / predicted[anchors])
        scaled[rows] *= np.exp(estimate_log_scale(log_ratios))
        is_anchor[anchors] = True
    return scaled, is_anchor


def score_rows(
    rows: UsableRows,
    anchors: int = 0,
    constants: TimingConstants | None = None,
    predicted: tuple[Array, Array] | None = None,
) -> ScoreReport:
    """The report on a file of rows. `predicted`: seconds and bands that somebody has already."""
    runs = rows.runs
    constants = constants or load_timing_constants()
    seconds, band = predicted or predict_runs(group_runs(runs), constants)
    labels = label_sources(runs, pool_small=anchors > 0)
    seconds, is_anchor = apply_anchor_scales(runs, seconds, labels, anchors)
    if anchors:
        has_experts = np.array([run.has_experts for run in runs], dtype=np.bool_)
        band = band * np.where(
            has_experts, constants.anchored_band_experts, constants.anchored_band
        )
    scored = ScoredRuns(runs, seconds, band, is_anchor)
    by_utilisation, _ = apply_anchor_scales(runs, predict_by_utilisation(runs), labels, anchors)
    baseline = ScoredRuns(runs, by_utilisation, np.zeros(len(runs)), is_anchor)
    everything = np.ones(len(runs), dtype=np.bool_)
    overall, of_baseline = (
        scored.summarise_selected(everything),
        baseline.summarise_selected(everything),
    )
    nan = float("nan")
    nothing = ErrorStats(0, nan, nan, nan, nan, nan, None)
    return ScoreReport(
        num_rows=rows.num_rows,
        anchors=anchors,
        num_anchor_rows=int(is_anchor.sum()),
        num_capped_sources=sum(count // 2 < anchors for count in Counter(labels).values()),
        num_inferred=sum(len(run.setups) > 1 for run in runs),
        overall=overall or nothing,
        sources=_score_by_label(scored, labels),
        classes=_score_by_class(scored),
        baseline=of_baseline or nothing,
        baseline_sources=_score_by_label(baseline, labels),
        memory=_score_memory_estimates(runs),
        regret=measure_regret(runs, seconds),
        worst=_list_worst_rows(scored),
        unusable=rows.unusable,
    )


def predict_by_utilisation(runs: Sequence[MeasuredRun]) -> Array:
    """Seconds of each run if every GPU and type had one utilisation: the median of these runs."""
    by_kind: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs:
        by_kind[run.gpu, run.precision].append(run.ideal_s / run.step_s)
    return np.array([run.ideal_s / np.median(by_kind[run.gpu, run.precision]) for run in runs])


def _score_by_label(scored: ScoredRuns, labels: Sequence[str]) -> dict[str, ErrorStats]:
    names, by_name = np.array(labels), {}
    for name in dict.fromkeys(labels):
        stats = scored.summarise_selected(names == name)
        if stats is not None:
            by_name[name] = stats
    return by_name


def _score_by_class(scored: ScoredRuns) -> dict[str, ErrorStats]:
    names = sorted({name for run in scored.runs for name in run.classes})
    by_class = {}
    for name in names:
        stats = scored.summarise_selected(np.array([name in run.classes for run in scored.runs]))
        if stats is not None:
            by_class[name] = stats
    return by_class


def _score_memory_estimates(runs: Sequence[MeasuredRun]) -> ErrorStats | None:
    errors = [
        run.memory_estimate_gib / run.memory_gib - 1 for run in runs if run.memory_gib is not None
    ]
    return summarise_errors(np.array(errors), None) if errors else None


def _list_worst_rows(scored: ScoredRuns) -> tuple[WorstRow, ...]:
    errors = np.abs(np.log(scored.predicted / scored.measured_step_s))
    errors[scored.is_anchor] = -1.0
    worst = []
    for row in np.argsort(-errors, kind="stable")[:NUM_WORST_ROWS]:
        if errors[row] < 0:
            continue
        run = scored.runs[row]
        worst.append(
            WorstRow(
                run.row_id,
                run.source,
                run.model,
                run.gpu,
                run.num_gpus,
                run.step_s,
                float(scored.predicted[row]),
            )
        )
    return tuple(worst)
