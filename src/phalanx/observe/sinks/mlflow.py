"""MLflow: the run's curves and its job in a database in `RUN/mlflow`, or on the server that
MLFLOW_TRACKING_URI names.

All attempts of a run, and all resumptions, are one MLflow run: its id is kept in
`RUN/mlflow/run-id`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.core.registry import import_optional_dependency
from phalanx.observe.events import Envelope
from phalanx.observe.outlet import Sink
from phalanx.observe.sinks._metrics import (
    EventMetricsExtractor,
    MetricValuesAtStep,
    read_job_sections,
    read_or_store_run_id,
)

REQUIRES = ("mlflow", "sqlalchemy", "alembic")
PRELOAD: tuple[str, ...] = ()
IS_APART = True  # importing it takes seconds, and a server may not answer
MAX_METRICS_PER_REQUEST = 500  # metrics of one request; the most that a server takes are 1000
MAX_PARAM_CHARS = 6000  # letters of a parameter
MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


def environment(run_dir: Path) -> dict[str, str]:
    return {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    }


def open_sink(run_dir: Path) -> Sink:
    """A run of MLflow's. Raises what MLflow raises for a server that refuses us."""
    needed_for = 'observe.sinks = ["mlflow"]'
    tracking = import_optional_dependency("mlflow.tracking", extra="mlflow", needed_for=needed_for)
    entities = import_optional_dependency("mlflow.entities", extra="mlflow", needed_for=needed_for)
    directory = (run_dir / "mlflow").resolve()
    directory.mkdir(parents=True, exist_ok=True)
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory}/mlflow.db"
    client = tracking.MlflowClient(uri)
    run_id, is_fresh = _find_or_create_run(client, run_dir, directory)
    if is_fresh:
        params = [entities.Param(key, value) for key, value in _flatten_job_to_params(run_dir)]
        client.log_batch(run_id, params=params)
    else:
        # The attempt before has ended it (set_terminated).
        client.update_run(run_id, status="RUNNING")
    greeting = f"writes run {run_id} to {uri}; `mlflow ui --backend-store-uri {uri}` shows it"
    return MlflowSink(
        client,
        entities.Metric,
        MetricsOfEarlierAttempts(client, run_id),
        EventMetricsExtractor(run_dir),
        greeting,
    )


def _find_or_create_run(client: Any, run_dir: Path, directory: Path) -> tuple[str, bool]:
    """The run to continue, or a new one in the experiment that MLFLOW_EXPERIMENT_NAME names
    ("phalanx")."""
    path = directory / "run-id"
    if path.exists():
        return read_or_store_run_id(path, "")
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "phalanx"
    experiment = client.get_experiment_by_name(name)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
    created = client.create_run(experiment_id, run_name=run_dir.resolve().name)
    return read_or_store_run_id(path, created.info.run_id)


def _flatten_job_to_params(run_dir: Path) -> Iterator[tuple[str, str]]:
    for section, keys in read_job_sections(run_dir).items():
        for key, value in keys.items():
            yield f"{section}.{key}", str(value)[:MAX_PARAM_CHARS]


class MetricsOfEarlierAttempts:
    """The values that earlier attempts wrote.

    Of a metric, they are read when a step of it may be there already.
    """

    def __init__(self, client: Any, run_id: str) -> None:
        self.run_id = run_id
        self._client = client
        self._values: dict[str, dict[int, float]] = {}
        self._last_step = max(self.values_by_step("train/loss"), default=-1)

    def is_written(self, name: str, step: int, value: float) -> bool:
        """True if this very value is the last one of its step: then there is nothing to add."""
        return step <= self._last_step and self.values_by_step(name).get(step) == value

    def values_by_step(self, name: str) -> dict[int, float]:
        """By step; of several values the latest."""
        if name not in self._values:
            history = self._client.get_metric_history(self.run_id, name)
            self._values[name] = {
                point.step: point.value for point in sorted(history, key=lambda it: it.timestamp)
            }
        return self._values[name]


class MlflowSink:
    """Turns rank 0's facts into metrics, sent in batches. `greeting`: where they are to be seen."""

    def __init__(
        self,
        client: Any,
        metric: Any,
        written: MetricsOfEarlierAttempts,
        metrics: EventMetricsExtractor,
        greeting: str,
    ) -> None:
        self.greeting = greeting
        self._client, self._metric, self._written, self._metrics = client, metric, written, metrics
        self._run_id = written.run_id
        self._waiting: list[Any] = []
        self._is_open = True

    def write(self, envelope: Envelope) -> None:
        """Queue the event's metrics. For a step that is done again, only changed values follow:
        MLflow can take none back."""
        point = self._metrics.extract_metric_point(envelope)
        if point is None or not self._is_open:
            return
        self._waiting += self._select_changed_metrics(point)
        if len(self._waiting) >= MAX_METRICS_PER_REQUEST:
            self.flush()

    def flush(self) -> None:
        """Send what waits. Each batch is committed when the call returns."""
        while self._waiting:
            self._client.log_batch(self._run_id, metrics=self._waiting[:MAX_METRICS_PER_REQUEST])
            del self._waiting[:MAX_METRICS_PER_REQUEST]

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.flush()
            self._client.set_terminated(self._run_id, MLFLOW_STATUS[self._metrics.final_status])

    def _select_changed_metrics(self, point: MetricValuesAtStep) -> list[Any]:
        time_ms = int(point.time_unix_s * 1000)
        metrics = []
        for name, value in point.values.items():
            # MLflow would draw infinity as 1.8e308.
            if math.isfinite(value) and not self._written.is_written(name, point.step, value):
                metrics.append(self._metric(name, value, time_ms, point.step))
        return metrics
