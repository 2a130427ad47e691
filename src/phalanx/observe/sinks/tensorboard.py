"""TensorBoard: the run's scalars in `RUN/tensorboard`, written with TensorBoard's own writer (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.core.registry import require
from phalanx.core.units import GIB
from phalanx.observe.bus import Sink
from phalanx.observe.events import Envelope, EvalFinished, RunStarted, StepFinished, StepSkipped

REQUIRES = "tensorboard"  # the package without which this sink cannot open; its extra has the sink's name
WRITER, PROTO = "tensorboard.summary.writer.event_file_writer", "tensorboard.compat.proto.event_pb2"
PRELOAD = (WRITER, PROTO)  # imported once before ranks are forked


def open_sink(run_dir: Path) -> Sink:
    """A sink that writes below `run_dir`. Raises EnvironmentProblem if tensorboard is not installed."""
    needed_for = 'observe.sinks = ["tensorboard"]'
    writers = require(WRITER, extra="tensorboard", needed_for=needed_for)
    events = require(PROTO, extra="tensorboard", needed_for=needed_for)
    return TensorBoardSink(writers.EventFileWriter(str(run_dir / "tensorboard")), events)


class TensorBoardSink:
    """Turns rank 0's facts into scalars. `proto` is tensorboard's module of event messages."""

    def __init__(self, writer: Any, proto: Any) -> None:
        self._writer = writer
        self._proto = proto
        self._num_skipped = 0
        self._is_fresh_attempt = False
        self._is_open = True

    def write(self, envelope: Envelope) -> None:
        if envelope.rank > 0 or not self._is_open:
            return
        event = envelope.event
        if isinstance(event, RunStarted):
            self._is_fresh_attempt = True
        elif isinstance(event, StepFinished):
            self._forget_what_is_redone(envelope, event.step)
            self._scalars(envelope, event.step, _of_step(event))
        elif isinstance(event, StepSkipped):
            self._num_skipped += 1
            self._scalars(envelope, event.step, {"train/skipped": self._num_skipped})
        elif isinstance(event, EvalFinished):
            self._scalars(envelope, event.step, {"eval/loss": event.loss})

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._writer.close()

    def _forget_what_is_redone(self, envelope: Envelope, step: int) -> None:
        """At the first step of an attempt, tell TensorBoard to drop what an earlier one wrote from here on."""
        if self._is_fresh_attempt:
            self._is_fresh_attempt = False
            message = self._proto.Event(wall_time=envelope.time_unix_s, step=step)
            message.session_log.status = self._proto.SessionLog.START
            self._writer.add_event(message)

    def _scalars(self, envelope: Envelope, step: int, values: Mapping[str, float]) -> None:
        message = self._proto.Event(wall_time=envelope.time_unix_s, step=step)
        for tag, value in values.items():
            message.summary.value.add(tag=tag, simple_value=value)
        self._writer.add_event(message)


def _of_step(event: StepFinished) -> dict[str, float]:
    scalars = {
        "train/loss": event.loss,
        "train/learning_rate": event.learning_rate,
        "train/grad_norm": event.grad_norm,
        "throughput/tokens_per_s": event.tokens_per_s,
        "time/step_s": event.step_s,
        "time/unaccounted_s": event.unaccounted_s,
        "memory/rss_gib": event.rss_bytes / GIB,
    }
    return scalars | {f"time/{phase}_s": seconds for phase, seconds in event.phases_s.items()}
