"""What of a run becomes a curve, under the same names in every sink; and how a run that a sink
follows has ended."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phalanx.core.files import read_json, read_whole_regular_file, write_bytes_atomically
from phalanx.core.units import GIB, MIB
from phalanx.observe.events import (
    BlockNormsMeasured,
    CheckpointSaved,
    Envelope,
    EvalFinished,
    Event,
    ExpertsLoaded,
    GpuMeasured,
    InvariantChecked,
    PipelineMeasured,
    RunStarted,
    StepFinished,
    StepSkipped,
    StopRequested,
)
from phalanx.observe.tail import read_recorded_events

_INVALID_NAME_CHARACTERS = re.compile(
    r"[^A-Za-z0-9_-]+"
)  # a source is named by its path; slashes make groups
# Skipped steps are counted, and sources keep their names, over all attempts of a run.
_REPLAYED_EVENT_CLASSES: tuple[type[Event], ...] = (RunStarted, StepSkipped, EvalFinished)

# They speak of a step that is over when they are told, or of one before.
_LATE_EVENT_CLASSES = (
    BlockNormsMeasured,
    CheckpointSaved,
    ExpertsLoaded,
    GpuMeasured,
    InvariantChecked,
    PipelineMeasured,
)

Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class MetricValuesAtStep:
    """Values at a step, by metric."""

    step: int
    time_unix_s: float
    values: dict[str, float]


class EventMetricsExtractor:
    """Turns the events of rank 0 into points and remembers how far the run has come.

    What earlier attempts did is read from the event files of `run_dir`: counters go on where they
    were.
    """

    def __init__(self, run_dir: Path | None = None) -> None:
        self._run_dir = run_dir
        self._knows_the_past = False
        self._skipped: set[int] = set()
        self._names: dict[str, str] = {}
        self._step, self._total_steps = 0, -1
        self._was_stopped = False

    def extract_metric_point(self, envelope: Envelope) -> MetricValuesAtStep | None:
        """The point that an event adds to the curves, if it adds one."""
        if envelope.rank > 0:
            return None
        if not self._knows_the_past:
            self._knows_the_past = True
            for event in _read_events_of_earlier_attempts(self._run_dir, envelope.attempt):
                self._remember_progress(event)
        event = envelope.event
        self._remember_progress(event)
        if isinstance(event, RunStarted):
            self._was_stopped = False
            self._step, self._total_steps = event.step, event.total_steps
        elif isinstance(event, StopRequested):
            self._was_stopped = True
        elif isinstance(event, StepSkipped):
            return MetricValuesAtStep(
                event.step, envelope.time_unix_s, {"train/skipped": len(self._skipped)}
            )
        elif isinstance(event, StepFinished | EvalFinished):
            if isinstance(event, StepFinished):
                self._step = event.step
            return MetricValuesAtStep(
                event.step,
                envelope.time_unix_s,
                extract_metric_values(event, self._names.__getitem__),
            )
        elif isinstance(event, _LATE_EVENT_CLASSES):
            # Never behind the newest step: W&B takes no rows of steps before.
            step = max(self._step, int(event.step))
            return MetricValuesAtStep(step, envelope.time_unix_s, extract_metric_values(event))
        return None

    @property
    def final_status(self) -> Status:
        """The run's status, if no more events follow."""
        if self._was_stopped:
            return "stopped"
        # total_steps is -1 until the run has started.
        if self._step >= self._total_steps >= 0:
            return "finished"
        return "failed"

    def _remember_progress(self, event: Event) -> None:
        if isinstance(event, RunStarted):  # what came after this step is done again
            self._skipped = {step for step in self._skipped if step <= event.step}
        elif isinstance(event, StepSkipped):
            self._skipped.add(event.step)
        elif isinstance(event, EvalFinished):
            for source in event.loss_by_source:
                self._choose_curve_name_of_source(source)

    def _choose_curve_name_of_source(self, source: str) -> None:
        """Give a source the name of its curve: another one than that of every source before it."""
        if source not in self._names:
            name = sanitise_metric_name(source)
            if name in self._names.values():
                name += f"-{hashlib.sha256(source.encode()).hexdigest()[:6]}"
            self._names[source] = name


def _read_events_of_earlier_attempts(run_dir: Path | None, attempt: int) -> Iterator[Event]:
    """The recorded events of attempts before this one, in order."""
    if run_dir is None or attempt <= 0:
        return
    for envelope in read_recorded_events(run_dir, *_REPLAYED_EVENT_CLASSES):
        if envelope.attempt < attempt:
            yield envelope.event


def sanitise_metric_name(name: str) -> str:
    """`name` with letters that every sink takes."""
    return _INVALID_NAME_CHARACTERS.sub("_", name)


def extract_metric_values(
    event: Event, name_of: Callable[[str], str] = sanitise_metric_name
) -> dict[str, float]:
    """The table of metrics: the values of one event by name, units in the names.

    `name_of` a source: its curve's.
    """
    if isinstance(event, StepFinished):
        values = {
            "train/loss": event.loss,
            "train/learning_rate": event.learning_rate,
            "train/grad_norm": event.grad_norm,
            "train/tokens_seen": event.tokens_seen,
            "throughput/tokens_per_s": event.tokens_per_s,
            "time/step_s": event.step_s,
            "time/unaccounted_s": event.unaccounted_s,
            "memory/rss_gib": event.rss_bytes / GIB,
        }
        if event.peak_bytes:
            values["memory/peak_gib"] = event.peak_bytes / GIB
        if event.reserved_bytes:
            values["memory/reserved_gib"] = event.reserved_bytes / GIB
        if event.sent_bytes:
            values["throughput/sent_mib"] = event.sent_bytes / MIB
        for axis, sent_bytes in event.sent_by_axis.items():
            if sent_bytes:
                values[f"throughput/sent_{axis}_mib"] = sent_bytes / MIB
        if event.loss_scale:
            values["train/loss_scale"] = event.loss_scale
        if event.cpu_s:
            values["time/cpu_s"] = event.cpu_s
        if event.waiting_s:
            values["time/wait_s"] = event.waiting_s
            values["time/self_s"] = event.step_s - event.waiting_s
        for words, seconds in event.communication_s.items():
            name = f"time/communication_{sanitise_metric_name(words.partition(':')[0])}_s"
            values[name] = values.get(name, 0.0) + seconds
        return values | {f"time/{phase}_s": seconds for phase, seconds in event.phases_s.items()}
    if isinstance(event, _LATE_EVENT_CLASSES):
        return _extract_values_told_late(event)
    if isinstance(event, EvalFinished):
        by_source = {
            f"eval/loss/{name_of(name)}": loss for name, loss in event.loss_by_source.items()
        }
        metrics = {
            f"eval/{sanitise_metric_name(name)}": value for name, value in event.metrics.items()
        }
        # The loss comes after the metrics: one that a user calls "loss" cannot take its place.
        return metrics | {"eval/loss": event.loss} | by_source
    return {}


def _extract_values_told_late(
    event: BlockNormsMeasured
    | CheckpointSaved
    | ExpertsLoaded
    | GpuMeasured
    | InvariantChecked
    | PipelineMeasured,
) -> dict[str, float]:
    match event:
        case BlockNormsMeasured():
            values = {}
            for name, norm in event.gradient_norms.items():
                values[f"blocks/grad_norm/{sanitise_metric_name(name)}"] = norm
            for name, ratio in event.update_ratios.items():
                values[f"blocks/update_ratio/{sanitise_metric_name(name)}"] = ratio
        case CheckpointSaved():
            values = {
                "checkpoint/save_s": event.wall_s,
                "checkpoint/stall_s": event.stall_s,
                "checkpoint/size_gib": event.num_bytes / GIB,
            }
            if event.num_new_bytes >= 0:
                values["checkpoint/written_gib"] = event.num_new_bytes / GIB
        case GpuMeasured():
            values = {"gpu/energy_j": event.energy_j, "gpu/busy_ratio": event.busy_share}
        case ExpertsLoaded():
            values = {
                "experts/busiest_ratio": event.worst[1],
                "experts/dropped_ratio": event.dropped_share,
            }
        case InvariantChecked():
            values = {f"invariants/{event.name}_failed": event.num_failed}
        case PipelineMeasured():
            values = {
                "pipeline/bubble_measured": event.bubble_measured,
                "pipeline/bubble_predicted": event.bubble_predicted,
                "pipeline/bubble_planned": event.bubble_planned,
            }
    return {name: value for name, value in values.items() if math.isfinite(value)}


def read_job_sections(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The resolved job by section; empty where the run has none yet (library use)."""
    try:
        job = read_json(run_dir / "job.json")
    except (OSError, ValueError):
        return {}
    return job if isinstance(job, dict) else {}


def read_or_store_run_id(path: Path, fresh: str) -> tuple[str, bool]:
    """The id that `path` keeps, or `fresh`, which it then keeps; and whether it is a fresh one.

    Raises OSError.

    So every attempt of a run, and every resumption, adds to the same curves.
    """
    try:
        run_id = read_whole_regular_file(path).decode("utf-8").strip()
    except FileNotFoundError:
        run_id = ""
    if run_id:
        return run_id, False
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(path, f"{fresh}\n".encode(), durable=False)
    return fresh, True
