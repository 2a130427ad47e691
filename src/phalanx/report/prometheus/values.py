"""The values of all metrics at a moment: what events add up to, without any format."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Set
from dataclasses import dataclass

from phalanx.report.prometheus.definitions import METRIC_BY_NAME, STEP_SECONDS_BUCKETS

LabelValues = tuple[str, ...]
"""Values of a metric's labels, in the order of its definition."""


@dataclass(frozen=True)
class HistogramValue:
    """`counts[i]` observations are at most `STEP_SECONDS_BUCKETS[i]` and above the bound before;
    the last count is of those above all bounds. `total` is their sum."""

    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True)
class MetricSnapshot:
    """Values at one moment, by metric name and label values. `run`: the label of all of them.
    `step_seconds`: None where they are not known."""

    run: str
    values: Mapping[str, Mapping[LabelValues, float]]
    step_seconds: HistogramValue | None

    def leave_out(self, names: Set[str]) -> MetricSnapshot:
        """The snapshot without the metrics of these names."""
        return MetricSnapshot(
            run=self.run,
            values={name: of_name for name, of_name in self.values.items() if name not in names},
            step_seconds=None if "phalanx_step_seconds" in names else self.step_seconds,
        )

    def find_value(self, name: str, *labels: str) -> float | None:
        """The value of a metric, or None where it has none yet."""
        return self.values.get(name, {}).get(labels)


class MetricValues:
    """Counters, gauges and the histogram of step seconds, as they stand."""

    def __init__(self) -> None:
        self._values: dict[str, dict[LabelValues, float]] = {}
        self._owed: dict[tuple[str, LabelValues], float] = {}
        self._bucket_counts = [0] * (len(STEP_SECONDS_BUCKETS) + 1)
        self._step_seconds_total = 0.0

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Add to a counter. A negative or missing amount adds nothing: counters never fall."""
        of_name = self._require_metric(name)
        if not amount > 0:
            amount = 0.0
        of_name[labels] = of_name.get(labels, 0.0) + amount

    def add_net(self, name: str, amount: float, *labels: str) -> None:
        """Add to a counter what may also be negative: it stands until later amounts make up for
        that, so that in the long run it is their sum."""
        if amount != amount:
            amount = 0.0
        net = amount - self._owed.get((name, labels), 0.0)
        self._owed[name, labels] = max(-net, 0.0)
        self.add(name, net, *labels)

    def set(self, name: str, value: float, *labels: str) -> None:
        self._require_metric(name)[labels] = float(value)

    def clear(self, name: str) -> None:
        """Take a metric out: its value is not known any more."""
        self._values.pop(name, None)

    def observe_step_seconds(self, seconds: float) -> None:
        self._bucket_counts[bisect_left(STEP_SECONDS_BUCKETS, seconds)] += 1
        self._step_seconds_total += seconds

    def build_snapshot(self, run: str, num_ranks: float = math.inf) -> MetricSnapshot:
        """The values as they stand. Gauges of ranks from `num_ranks` on are left out: a run that
        goes on with fewer ranks has no such rank any more, and nothing of it is so now."""
        return MetricSnapshot(
            run=run,
            values={
                name: _select_ranks_below(num_ranks, name, of_name)
                for name, of_name in self._values.items()
            },
            step_seconds=HistogramValue(tuple(self._bucket_counts), self._step_seconds_total),
        )

    def _require_metric(self, name: str) -> dict[LabelValues, float]:
        of_name = self._values.get(name)
        if of_name is None:
            # A metric that is not in the table would have no type and no meaning.
            assert name in METRIC_BY_NAME, name
            of_name = self._values[name] = {}
        return of_name


def _select_ranks_below(
    num_ranks: float, name: str, of_name: Mapping[LabelValues, float]
) -> dict[LabelValues, float]:
    definition = METRIC_BY_NAME[name]
    if definition.kind != "gauge" or "rank" not in definition.labels:
        return dict(of_name)
    rank_index = definition.labels.index("rank")
    return {
        labels: value for labels, value in of_name.items() if float(labels[rank_index]) < num_ranks
    }
