"""What of a run becomes a curve, under the same names in every sink; and how a run that a sink follows has ended."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phalanx.core.units import GIB
from phalanx.observe.events import (
    Envelope,
    EvalFinished,
    Event,
    RunStarted,
    StepFinished,
    StepSkipped,
    StopRequested,
)

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")  # a source is named by its path; slashes make groups

Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class Point:
    """Values at a step, by metric. `starts_attempt`: the first one of an attempt; later steps are (done) again."""

    step: int
    time_unix_s: float
    values: dict[str, float]
    starts_attempt: bool = False


class Metrics:
    """Turns the events of rank 0 into points and remembers how far the run has come."""

    def __init__(self) -> None:
        self._num_skipped = 0
        self._starts_attempt = False
        self._step, self._total_steps = 0, -1
        self._was_stopped = False

    def take(self, envelope: Envelope) -> Point | None:
        """The point that an event adds to the curves, if it adds one."""
        if envelope.rank > 0:
            return None
        event = envelope.event
        if isinstance(event, RunStarted):
            self._starts_attempt, self._was_stopped = True, False
            self._step, self._total_steps = event.step, event.total_steps
        elif isinstance(event, StopRequested):
            self._was_stopped = True
        elif isinstance(event, StepSkipped):
            self._num_skipped += 1
            return self._point(envelope, event.step, {"train/skipped": self._num_skipped})
        elif isinstance(event, StepFinished | EvalFinished):
            if isinstance(event, StepFinished):
                self._step = event.step
            return self._point(envelope, event.step, values_of(event))
        return None

    @property
    def status(self) -> Status:
        """How the run ended, if this is all that there is of it."""
        if self._was_stopped:
            return "stopped"
        return "finished" if self._step >= self._total_steps >= 0 else "failed"

    def _point(self, envelope: Envelope, step: int, values: dict[str, float]) -> Point:
        starts, self._starts_attempt = self._starts_attempt, False
        return Point(step, envelope.time_unix_s, values, starts)


def values_of(event: Event) -> dict[str, float]:
    """The table of metrics: the values of one event by name, units in the names."""
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
        return values | {f"time/{phase}_s": seconds for phase, seconds in event.phases_s.items()}
    if isinstance(event, EvalFinished):
        by_source = {f"eval/loss/{_NOT_IN_NAMES.sub('_', name)}": loss for name, loss in event.loss_by_source.items()}
        return {"eval/loss": event.loss} | by_source
    return {}


def read_job(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The resolved job by section; empty where the run has none yet (library use)."""
    try:
        job = json.loads((run_dir / "job.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return job if isinstance(job, dict) else {}


def kept_id(path: Path, fresh: str) -> tuple[str, bool]:
    """The id that `path` keeps, or `fresh`, which it then keeps; and whether it is a fresh one. Raises OSError.

    So every attempt of a run, and every resumption, adds to the same curves.
    """
    try:
        found = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        found = ""
    if found:
        return found, False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fresh + "\n", encoding="utf-8")
    return fresh, True
