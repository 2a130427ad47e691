"""The bus: the step loop emits facts here and never waits for whoever reads them.

The process's own JSONL file is written at once (a buffered write and a flush, tens of microseconds). Every sink lives
behind an outlet: a queue and a thread of its own, in which it is also opened and closed. Whatever a sink does, no step
waits for it, and the end of the run does for `CLOSE_S`, or longer for one at work. Secrets of the environment are
taken out of every event before anybody sees it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from phalanx.core.secrets import Redactor
from phalanx.observe.events import Envelope, Event, SinkDropped, seal
from phalanx.observe.outlet import OpenSink, Outlet, Sink

__all__ = ["CLOSE_S", "Bus", "OpenSink", "Sink", "event_path"]

CLOSE_S = 15.0  # all sinks of a process together have this long to finish; what still runs then is left behind
CLOSE_MORE_S = 60.0  # and this much longer after a good end, while they are seen to work
CLOSE_AFTER_ERROR_S = 1.0  # a rank that failed is waited for by all others
QUEUE_SIZE = 4096

_NUMBERS = frozenset(("int", "float", "bool", "dict[str, int]", "dict[str, float]", "list[int]", "list[float]"))


def event_path(run_dir: Path, rank: int, attempt: int) -> Path:
    """`RUN/events/rank-0003-attempt-01.jsonl`, or `supervisor.jsonl` for rank -1."""
    name = f"rank-{rank:04d}-attempt-{attempt:02d}.jsonl" if rank >= 0 else "supervisor.jsonl"
    return run_dir / "events" / name


class Bus:
    """Carries the events of one process. `run_dir=None` keeps no file (library use).

    `sinks` are names and what opens them; they are opened in the background, at once.
    """

    def __init__(
        self,
        *,
        rank: int,
        attempt: int = 0,
        run_dir: Path | None = None,
        sinks: Sequence[tuple[str, OpenSink]] = (),
        queue_size: int = QUEUE_SIZE,
    ) -> None:
        self.rank, self.attempt = rank, attempt
        self.num_unwritten = 0  # events that the file did not take
        self._redactor = Redactor(os.environ)
        self._text_fields: dict[type[Event], tuple[str, ...]] = {}
        self._file = None
        self._lock = threading.Lock()
        if run_dir is not None:
            path = event_path(run_dir, rank, attempt)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8")
        self._outlets: list[Outlet] = []
        for name, open_sink in sinks:
            self._outlets.append(Outlet(name, open_sink, queue_size=queue_size, tell=partial(self._tell, name)))

    @property
    def num_lost(self) -> int:
        """Events that did not get somewhere, so far."""
        return self.num_unwritten + sum(outlet.num_lost for outlet in self._outlets)

    def emit(self, event: Event) -> None:
        """Record a fact. Never raises and never waits for a sink."""
        self._tell("", event)

    def _tell(self, about: str, event: Event) -> None:
        """To the file and to every sink, except the one it is about."""
        event = self._without_secrets(event)
        envelope = seal(event, rank=self.rank, attempt=self.attempt)
        self._write_file(envelope)
        for outlet in self._outlets:
            if outlet.name != about:
                outlet.put(envelope)

    def close(self, timeout_s: float = CLOSE_S, more_s: float = 0.0) -> None:
        """Let the sinks write what is queued and close, all at the same time; tell what was lost, if anything.

        A sink that is still at work then has up to `more_s` more.
        """
        until = time.monotonic() + timeout_s
        for outlet in self._outlets:
            outlet.finish()
        for outlet in self._outlets:
            outlet.join(until, max(0.0, more_s - max(0.0, time.monotonic() - until)))
        if self.num_unwritten:
            self.emit(SinkDropped("events", self.num_unwritten, "the event file did not take them"))
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _without_secrets(self, event: Event) -> Event:
        """The event itself where it has only numbers: what a step emits."""
        kind = type(event)
        names = self._text_fields.get(kind)
        if names is None:
            names = tuple(item.name for item in fields(kind) if str(item.type) not in _NUMBERS)
            self._text_fields[kind] = names
        if not names:
            return event
        return replace(event, **{name: self._redactor.value(getattr(event, name)) for name in names})

    def _write_file(self, envelope: Envelope) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(envelope.to_line() + "\n")
                self._file.flush()
            except (OSError, ValueError, TypeError):  # a full disk, or a note that is not JSON, must not stop training
                self.num_unwritten += 1
