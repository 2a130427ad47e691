"""A snapshot of metrics as Prometheus reads it: text format 0.0.4, or OpenMetrics where a scraper
asks for it, by the library prometheus-client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from phalanx.core.registry import import_optional_dependency
from phalanx.report.prometheus.definitions import METRICS, STEP_SECONDS_BUCKETS, MetricDefinition
from phalanx.report.prometheus.values import HistogramValue, LabelValues, MetricSnapshot

NEEDED_PACKAGE = "prometheus_client"
EXTRA = "prometheus"


def render_metrics(snapshot: MetricSnapshot) -> str:
    """The snapshot in the text format 0.0.4.

    Raises EnvironmentProblem if prometheus-client is not installed.
    """
    text: bytes = _import_library().generate_latest(_SnapshotCollector(lambda: snapshot))
    return text.decode()


def build_metrics_app(get_snapshot: Callable[[], MetricSnapshot | None]) -> Callable[..., Any]:
    """A WSGI application that answers with the newest snapshot, in the format and encoding that a
    scraper asks for.

    Raises EnvironmentProblem if prometheus-client is not installed.
    """
    library = _import_library()
    registry = library.CollectorRegistry()
    registry.register(_SnapshotCollector(get_snapshot))
    app: Callable[..., Any] = library.make_wsgi_app(registry)
    return app


def _import_library() -> Any:
    return import_optional_dependency(NEEDED_PACKAGE, extra=EXTRA, needed_for="serving metrics")


def _import_core() -> Any:
    return import_optional_dependency(
        f"{NEEDED_PACKAGE}.core", extra=EXTRA, needed_for="serving metrics"
    )


def build_metrics_json(snapshot: MetricSnapshot) -> dict[str, Any]:
    """The snapshot as JSON: each metric with its type, meaning and samples."""
    metrics = []
    for definition in METRICS:
        samples: list[dict[str, Any]] = []
        if definition.kind == "histogram" and snapshot.step_seconds is not None:
            samples = [_build_histogram_json(snapshot.step_seconds)]
        for labels, value in snapshot.values.get(definition.name, {}).items():
            named = dict(zip(definition.labels, labels, strict=True))
            samples.append({"labels": named, "value": value})
        metrics.append(
            {
                "name": definition.name,
                "type": definition.kind,
                "meaning": definition.meaning,
                "samples": samples,
            }
        )
    return {"run": snapshot.run, "metrics": metrics}


def _build_histogram_json(histogram: HistogramValue) -> dict[str, Any]:
    buckets = zip(STEP_SECONDS_BUCKETS, accumulate(histogram.counts), strict=False)
    return {
        "buckets": [{"le": bound, "count": count} for bound, count in buckets],
        "sum": histogram.total,
        "count": sum(histogram.counts),
    }


class _SnapshotCollector:
    """The object that prometheus-client's encoders ask for metrics."""

    def __init__(self, get_snapshot: Callable[[], MetricSnapshot | None]) -> None:
        self._get_snapshot = get_snapshot

    def describe(self) -> Iterator[Any]:
        """The metrics without values: a scraper may ask for some by name (?name[]=...)."""
        core = _import_core()
        for definition in METRICS:
            if definition.kind == "histogram":
                yield core.HistogramMetricFamily(definition.name, definition.meaning)
            else:
                yield _build_family(core, definition, "", {})

    def collect(self) -> Iterator[Any]:
        core = _import_core()
        # One snapshot for the whole scrape: its values are of one moment.
        snapshot = self._get_snapshot()
        if snapshot is None:
            return
        for definition in METRICS:
            if definition.kind == "histogram":
                if snapshot.step_seconds is not None:
                    yield _build_histogram(core, definition, snapshot.run, snapshot.step_seconds)
            elif samples := snapshot.values.get(definition.name):
                yield _build_family(core, definition, snapshot.run, samples)


def _build_family(
    core: Any, definition: MetricDefinition, run: str, samples: Mapping[LabelValues, float]
) -> Any:
    family_class = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "info": core.InfoMetricFamily,
    }[definition.kind]
    labels = ("run", *definition.labels)
    if definition.kind == "info":
        family = family_class(definition.name, definition.meaning)
        for values in samples:
            texts = _encode_labels(run, *values)
            family.add_metric((), dict(zip(labels, texts, strict=True)))
        return family
    family = family_class(definition.name, definition.meaning, labels=labels)
    for values, value in samples.items():
        family.add_metric(_encode_labels(run, *values), value)
    return family


def _encode_labels(*labels: str) -> tuple[str, ...]:
    """Labels as UTF-8 has them: names of files and texts of events may hold half a character."""
    return tuple(label.encode("utf-8", "backslashreplace").decode() for label in labels)


def _build_histogram(
    core: Any, definition: MetricDefinition, run: str, histogram: HistogramValue
) -> Any:
    family = core.HistogramMetricFamily(definition.name, definition.meaning, labels=("run",))
    bounds = [str(bound) for bound in STEP_SECONDS_BUCKETS] + ["+Inf"]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    family.add_metric(_encode_labels(run), buckets, histogram.total)
    return family
