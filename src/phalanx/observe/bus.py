"""The bus: the step loop emits facts here and never waits for whoever reads them.

The process's own JSONL file is written at once (one write, tens of microseconds). Every sink lives
behind an outlet: a queue and a thread of its own, in which it is also opened and closed. Whatever a
sink does, no step waits for it, and the end of the run does for `CLOSE_TIMEOUT_S`, or longer for
one at work. Secrets of the environment are taken out of every event before anybody sees it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from phalanx.core.secrets import Redactor
from phalanx.observe.event_file import EventFile
from phalanx.observe.events import (
    EVENTS_REMOVED,
    EVENTS_UNWRITTEN,
    Envelope,
    Event,
    Note,
    SinkDropped,
    wrap_event_in_envelope,
)
from phalanx.observe.outlet import OpenSink, Sink, SinkThread

__all__ = ["CLOSE_TIMEOUT_S", "Bus", "OpenSink", "Sink", "build_event_file_path"]

# all sinks of a process together have this long to finish; what still runs then is left behind
CLOSE_TIMEOUT_S = 15.0
# And this much longer after a good end, while they are seen to work.
SLOW_SINK_CLOSE_TIMEOUT_S = 60.0
CLOSE_AFTER_ERROR_TIMEOUT_S = 1.0  # a rank that failed is waited for by all others
# Events of each sink that wait for it; what comes beyond is counted as lost.
MAX_QUEUED_EVENTS = 4096

_NUMERIC_ANNOTATIONS = frozenset(
    ("int", "float", "bool", "dict[str, int]", "dict[str, float]", "list[int]", "list[float]")
)


def build_event_file_path(run_dir: Path, rank: int, attempt: int) -> Path:
    """`RUN/events/rank-0003-attempt-01.jsonl`, or `supervisor.jsonl` for rank -1."""
    name = f"rank-{rank:04d}-attempt-{attempt:02d}.jsonl" if rank >= 0 else "supervisor.jsonl"
    return run_dir / "events" / name


class Bus:
    """Carries the events of one process. `run_dir=None` keeps no file (library use).

    `sinks` are names and what opens them; they are opened in the background, at once.
    `on_unwritten` takes what the file refuses, at once: a full disk must not hide what happens.
    Once `may_write` says no (the run is another job's), nothing more is written anywhere.
    `earlier`: what `take_unwritten` of this process's last bus gave. Raises ResourceError if the
    file cannot be opened.
    """

    def __init__(
        self,
        *,
        rank: int,
        attempt: int = 0,
        run_dir: Path | None = None,
        sinks: Sequence[tuple[str, OpenSink]] = (),
        queue_size: int = MAX_QUEUED_EVENTS,
        on_unwritten: Callable[[Envelope], None] = lambda envelope: None,
        may_write: Callable[[], bool] = lambda: True,
        earlier: EventFile | None = None,
    ) -> None:
        self.rank, self.attempt = rank, attempt
        self._on_unwritten, self._may_write = on_unwritten, may_write
        self._num_not_json = self._num_told = 0
        self._is_refused = self._begins_file = False
        self._redactor = Redactor(os.environ)
        self._text_fields: dict[type[Event], tuple[str, ...]] = {}
        self._lock = threading.Lock()
        self._file = (
            EventFile(build_event_file_path(run_dir, rank, attempt), earlier)
            if run_dir is not None
            else None
        )
        self._outlets: list[SinkThread] = []
        for name, open_sink in sinks:
            self._outlets.append(
                SinkThread(
                    name,
                    open_sink,
                    queue_size=queue_size,
                    tell=partial(self._write_event_to_file_and_sinks, name),
                )
            )

    @property
    def num_unwritten(self) -> int:
        """Events that the file has not taken, so far."""
        if self._file is None:
            return self._num_not_json
        return self._num_not_json + self._file.num_unwritten

    @property
    def refusal(self) -> OSError | None:
        """Why the file did not take the last event; None if it did."""
        if self._file is None:
            return None
        return self._file.refusal

    @property
    def num_lost(self) -> int:
        """Events that did not get somewhere, so far."""
        return self.num_unwritten + sum(outlet.num_lost for outlet in self._outlets)

    def emit(self, event: Event) -> None:
        """Record a fact. Never raises and never waits for a sink."""
        self._write_event_to_file_and_sinks("", event)

    def _write_event_to_file_and_sinks(self, about: str, event: Event) -> None:
        """To the file and to every sink, except the one it is about."""
        if not self._may_write():
            return
        # Before the event: where that is the run's last, nothing follows it.
        self.keep_file_in_place()
        event = self._hide_secrets(event)
        # Events come from the step loop and from threads, such as a sink's: under one lock lines
        # are in the file in the order of their numbers.
        with self._lock:
            envelope = wrap_event_in_envelope(
                event,
                rank=self.rank,
                attempt=self.attempt,
                seq=self._num_told,
                begins_file=self._begins_file,
            )
            self._num_told += 1
            is_written = self._append_to_event_file(envelope)
            is_news, self._is_refused = not is_written and not self._is_refused, not is_written
            refusal = self.refusal
        # Outside of the lock, which the note takes again; once for each time that the disk begins
        # to refuse.
        if is_news and refusal is not None:
            why = (
                f"events cannot be written ({refusal.strerror}): they are kept, shown, and written"
                " once they can be"
            )
            self._write_event_to_file_and_sinks("", Note(EVENTS_UNWRITTEN, {"why": why}))
        if not is_written:
            self._on_unwritten(envelope)
        for outlet in self._outlets:
            if outlet.name != about:
                outlet.queue_event(envelope)

    def keep_file_in_place(self, *, now: bool = False) -> None:
        """Go on in a new event file where someone has removed this one, and say so; looks once a
        second, or `now`. Each event asks, too: this is for a process that tells nothing for
        hours."""
        with self._lock:
            file = self._file
            if file is None or not (self._may_write() and file.reopen_if_removed(now=now)):
                return
            self._begins_file = True
        # Ranks meet the same: the supervisor says it for all.
        if self.rank < 0:
            # A rank may have made the folder anew by now.
            why = (
                f"{file.path}, or its folder, was removed or moved while the run trained: what was"
                " recorded before is not there any more, and what follows is in a new file"
            )
            self._write_event_to_file_and_sinks("", Note(EVENTS_REMOVED, {"why": why}))

    def close(
        self, timeout_s: float = CLOSE_TIMEOUT_S, more_s: float = 0.0, *, goes_on: bool = False
    ) -> None:
        """Let the sinks write what is queued and close, all at the same time; tell what was lost,
        if anything.

        A sink that is still at work then has up to `more_s` more. Where the process `goes_on` with
        another bus, lines that the disk has not taken wait for `take_unwritten` or `close_file`.
        """
        # Nor may the sinks write what they still have: they end with the process.
        if not self._may_write():
            self._outlets = []
        until = time.monotonic() + timeout_s
        # All are told before any is waited for, so that they finish at the same time.
        for outlet in self._outlets:
            outlet.put_end_of_events()
        for outlet in self._outlets:
            outlet.join(until, max(0.0, more_s - max(0.0, time.monotonic() - until)))
        if not (goes_on and not self._try_to_write_kept_lines()):
            self.close_file()

    def close_file(self) -> None:
        """Close the event file, and tell which lines the disk has not taken by now."""
        # A last try, before it is told that they are lost.
        self._try_to_write_kept_lines()
        if self.num_unwritten:
            owner = "the supervisor" if self.rank < 0 else f"rank {self.rank}"
            reason = f"the event file of {owner} did not take them"
            if self.refusal is not None:
                reason += f" ({self.refusal.strerror})"
            self.emit(SinkDropped("events", self.num_unwritten, reason))
        with self._lock:
            if self._file is not None:
                self._file.close()
                # The count outlives the file, which `num_unwritten` asks as long as it is open.
                self._num_not_json, self._file = self.num_unwritten, None

    def _try_to_write_kept_lines(self) -> bool:
        """False if lines are left that the disk does not take now, either."""
        with self._lock:
            if self._file is None or not self._file.has_kept_lines:
                return True
            return self._may_write() and self._file.write_kept_lines()

    def take_unwritten(self) -> EventFile | None:
        """The file with the lines that the disk had not taken when this bus was closed, for the
        next bus of the process; None where there are none."""
        with self._lock:
            file, self._file = self._file, None
        return file

    def _hide_secrets(self, event: Event) -> Event:
        """The event itself where it has only numbers: what a step emits."""
        kind = type(event)
        # Looked up once for each kind: this runs in every step.
        names = self._text_fields.get(kind)
        if names is None:
            names = tuple(
                item.name for item in fields(kind) if str(item.type) not in _NUMERIC_ANNOTATIONS
            )
            self._text_fields[kind] = names
        if not names:
            return event
        return replace(
            event, **{name: self._redactor.redact_value(getattr(event, name)) for name in names}
        )

    def _append_to_event_file(self, envelope: Envelope) -> bool:
        """False if the file has refused the line, and keeps it."""
        if self._file is None:
            return True
        try:
            line = envelope.to_line(begins_file=self._begins_file)
        # A note that is not JSON must not stop training.
        except (ValueError, TypeError):
            # Counted, but not told as refused: nothing is wrong with the disk.
            self._num_not_json += 1
            return True
        # Asked again beside the write: a process may have stood still since it began to tell this
        # event.
        if not self._may_write():
            return True
        self._begins_file = False
        return self._file.append(line)
