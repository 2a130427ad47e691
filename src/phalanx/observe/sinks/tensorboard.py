"""TensorBoard: the run's scalars in `RUN/tensorboard`, written with TensorBoard's own writer (no
torch)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.core.registry import import_optional_dependency
from phalanx.observe.events import Envelope, RunStarted
from phalanx.observe.outlet import Sink
from phalanx.observe.sinks._metrics import EventMetricsExtractor

REQUIRES = ("tensorboard",)
WRITER, PROTO = "tensorboard.summary.writer.event_file_writer", "tensorboard.compat.proto.event_pb2"
PRELOAD = (WRITER, PROTO)
IS_APART = False


def open_sink(run_dir: Path) -> Sink:
    """A sink that writes below `run_dir`.

    Raises EnvironmentProblem if tensorboard is not installed.
    """
    needed_for = 'observe.sinks = ["tensorboard"]'
    writers = import_optional_dependency(WRITER, extra="tensorboard", needed_for=needed_for)
    events = import_optional_dependency(PROTO, extra="tensorboard", needed_for=needed_for)
    return TensorBoardSink(
        writers.EventFileWriter(str(run_dir / "tensorboard")),
        events,
        EventMetricsExtractor(run_dir),
    )


class TensorBoardSink:
    """Turns rank 0's facts into scalars. `proto` is tensorboard's module of event messages."""

    def __init__(self, writer: Any, proto: Any, metrics: EventMetricsExtractor) -> None:
        self._writer, self._proto, self._metrics = writer, proto, metrics
        self._is_open = True

    def write(self, envelope: Envelope) -> None:
        point = self._metrics.extract_metric_point(envelope)
        if not self._is_open:
            return
        if isinstance(envelope.event, RunStarted) and envelope.rank <= 0:
            self._write_purge_of_repeated_steps(envelope.event, envelope.time_unix_s)
        if point is None:
            return
        message = self._proto.Event(wall_time=point.time_unix_s, step=point.step)
        for tag, value in point.values.items():
            message.summary.value.add(tag=tag, simple_value=value)
        self._writer.add_event(message)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._writer.close()

    def _write_purge_of_repeated_steps(self, started: RunStarted, time_unix_s: float) -> None:
        """Tell TensorBoard to drop what an earlier attempt wrote of the steps from here on.

        The step that is continued from stands, whatever comes first now: its evaluation, perhaps.
        """
        # A reader drops what it has of this step and later ones, hence the step behind.
        message = self._proto.Event(wall_time=time_unix_s, step=started.step + 1)
        message.session_log.status = self._proto.SessionLog.START
        self._writer.add_event(message)
