"""The bus: the step loop emits facts here and never waits for whoever reads them.

The rank's own JSONL file is written at once (a buffered write and a flush, tens of microseconds). Every other sink
runs in one background thread behind a bounded queue: a slow sink loses events, which are counted, and a sink that
raises is dropped, which is said once. Training goes on in both cases.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from phalanx.observe.events import Envelope, Event, SinkDropped, seal


class Sink(Protocol):
    """Takes facts, formats them somewhere. Called from one thread only, never from the step loop."""

    def write(self, envelope: Envelope) -> None: ...

    def close(self) -> None: ...


def event_path(run_dir: Path, rank: int, attempt: int) -> Path:
    """`RUN/events/rank-0003-attempt-01.jsonl`, or `supervisor.jsonl` for rank -1."""
    name = f"rank-{rank:04d}-attempt-{attempt:02d}.jsonl" if rank >= 0 else "supervisor.jsonl"
    return run_dir / "events" / name


class Bus:
    """Carries the events of one process. `run_dir=None` keeps no file (library use)."""

    def __init__(
        self,
        *,
        rank: int,
        attempt: int = 0,
        run_dir: Path | None = None,
        sinks: Sequence[tuple[str, Sink]] = (),
        queue_size: int = 4096,
    ) -> None:
        self.rank, self.attempt = rank, attempt
        self.num_lost = 0
        self._file = None
        self._lock = threading.Lock()
        if run_dir is not None:
            path = event_path(run_dir, rank, attempt)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8")
        self._sinks = list(sinks)
        self._queue: queue.Queue[Envelope | None] = queue.Queue(queue_size)
        self._thread: threading.Thread | None = None
        if self._sinks:
            self._thread = threading.Thread(target=self._drain, name="phalanx-sinks", daemon=True)
            self._thread.start()

    def emit(self, event: Event) -> None:
        """Record a fact. Never raises and never blocks on a sink."""
        envelope = seal(event, rank=self.rank, attempt=self.attempt)
        self._write_file(envelope)
        if self._thread is not None:
            try:
                self._queue.put_nowait(envelope)
            except queue.Full:
                self.num_lost += 1

    def _write_file(self, envelope: Envelope) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(envelope.to_line() + "\n")
                self._file.flush()
            except (OSError, ValueError):  # a full disk must not stop training
                self.num_lost += 1

    def _drain(self) -> None:
        while (envelope := self._queue.get()) is not None:
            for name, sink in list(self._sinks):
                try:
                    sink.write(envelope)
                except Exception as error:
                    self._sinks.remove((name, sink))
                    with contextlib.suppress(Exception):
                        sink.close()
                    reason = f"{type(error).__name__}: {error}"
                    self._write_file(seal(SinkDropped(name, 0, reason), rank=self.rank, attempt=self.attempt))

    def close(self, timeout_s: float = 5.0) -> None:
        """Flush what is queued, close the sinks, and say how many events were lost, if any."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
        stuck = self._thread is not None and self._thread.is_alive()
        for name, sink in [] if stuck else self._sinks:  # a sink that still writes cannot be closed from here
            try:
                sink.close()
            except Exception as error:
                reason = f"on close: {type(error).__name__}: {error}"
                self._write_file(seal(SinkDropped(name, 0, reason), rank=self.rank, attempt=self.attempt))
        if self.num_lost:
            lost = SinkDropped("bus", self.num_lost, "queue full or event file unwritable")
            self._write_file(seal(lost, rank=self.rank, attempt=self.attempt))
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
