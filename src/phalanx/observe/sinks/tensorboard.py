"""TensorBoard: the run's scalars in `RUN/tensorboard`, written with TensorBoard's own writer (no torch)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.core.registry import require
from phalanx.observe.events import Envelope
from phalanx.observe.outlet import Sink
from phalanx.observe.sinks._metrics import Metrics, Point

REQUIRES = ("tensorboard",)
WRITER, PROTO = "tensorboard.summary.writer.event_file_writer", "tensorboard.compat.proto.event_pb2"
PRELOAD = (WRITER, PROTO)
IS_APART = False


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
        self._metrics = Metrics()
        self._is_open = True

    def write(self, envelope: Envelope) -> None:
        point = self._metrics.take(envelope)
        if point is None or not self._is_open:
            return
        if point.starts_attempt:
            self._forget_what_is_redone(point)
        message = self._proto.Event(wall_time=point.time_unix_s, step=point.step)
        for tag, value in point.values.items():
            message.summary.value.add(tag=tag, simple_value=value)
        self._writer.add_event(message)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._writer.close()

    def _forget_what_is_redone(self, point: Point) -> None:
        """At the first step of an attempt, tell TensorBoard to drop what an earlier one wrote from here on."""
        message = self._proto.Event(wall_time=point.time_unix_s, step=point.step)
        message.session_log.status = self._proto.SessionLog.START
        self._writer.add_event(message)
