"""An outlet: one sink with a bounded queue and a thread of its own, so that nobody else ever waits
for it.

The thread opens the sink, writes and closes it. A sink that raises is out, which is told once; one
that does not keep up loses events, which are counted; one that stands still is left behind when the
run ends.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from phalanx.core.errors import PhalanxError
from phalanx.core.printable import describe_foreign_error
from phalanx.observe.events import Envelope, Event, Note, SinkDropped


class Sink(Protocol):
    """Takes facts, formats them somewhere.

    Called from one thread only, never from the step loop.
    """

    def write(self, envelope: Envelope) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class AbandonableSink(Protocol):
    """A sink that can be ended from another thread while it stands still, and knows what that
    may cost."""

    def abandon(self) -> None: ...

    def has_progressed_since_last_call(self) -> bool:
        """True if it has done anything since this was asked last."""
        ...

    @property
    def num_unwritten(self) -> int:
        """Events that it has taken and that are not known to be durable."""
        ...


@runtime_checkable
class FlushableSink(Protocol):
    """A sink that can make durable what it has taken."""

    def flush(self) -> None: ...


@runtime_checkable
class SinkWithMessages(Protocol):
    """A sink that has something to say to the person who trains: where the curves are, what was
    done instead."""

    def listen(self, say: Callable[[str], None]) -> None: ...


SINK_STALL_TIMEOUT_S = 5.0  # a sink that did nothing for so long stands still

OpenSink = Callable[[], Sink]


class SinkThread:
    """Feeds the sink that `open_sink` opens, in the background.

    `tell` takes what others should hear of it.
    """

    def __init__(
        self, name: str, open_sink: OpenSink, *, queue_size: int, tell: Callable[[Event], None]
    ) -> None:
        self.name = name
        self.num_lost = 0
        self._open_sink, self._tell = open_sink, tell
        self._sink: Sink | None = None
        self._doing = "opens"
        self._is_over = False  # nothing more is wanted, or taken
        self._knows_the_end = False
        self._finish_s = 0.0
        self._queue: queue.Queue[Envelope | None] = queue.Queue(queue_size)
        self._thread = threading.Thread(
            target=self._write_queued_events, name=f"phalanx-sink-{name}", daemon=True
        )
        self._thread.start()

    def queue_event(self, envelope: Envelope) -> None:
        """Hand over a fact. Never waits."""
        if self._is_over:
            return
        try:
            self._queue.put_nowait(envelope)
        except queue.Full:
            self.num_lost += 1
            # Told once; how many they were is told at the end.
            if self.num_lost == 1:
                why = f"{self.name} {self._doing} too slowly: events are left out and counted"
                self._tell(Note("sink_is_slow", {"sink": self.name, "why": why}))

    def put_end_of_events(self) -> None:
        """End the stream: nothing is put any more. Does not wait."""
        self._finish_s = time.monotonic()
        self._queue_end_mark(0.0)

    def join(self, until: float, more_s: float = 0.0) -> None:
        """Wait for the sink to be closed, until that time (monotonic seconds), and then up to
        `more_s` longer while it is seen to work; then tell what was lost, if anything.
        """
        # Its answer is not wanted: the next one says what was done since this call.
        self._has_sink_progressed_since_last_call()
        self._wait(until)
        while (
            more_s > 0
            and self._thread.is_alive()
            and not self._is_over
            and self._has_sink_progressed_since_last_call()
        ):
            window_s = min(SINK_STALL_TIMEOUT_S, more_s)
            more_s -= window_s
            self._wait(time.monotonic() + window_s)
        if self._thread.is_alive() and not self._is_over:
            # First: a thread that wakes up now takes no more events.
            self._is_over = True
            num_lost = self.num_lost + self._num_queued_events()
            num_unknown = self._num_unwritten()
            if isinstance(self._sink, AbandonableSink):
                self._sink.abandon()
            waited_s = time.monotonic() - self._finish_s
            reason = f"it still {self._doing} after {waited_s:.1f} s and is left behind"
            if num_unknown:
                reason += "; some of them may be written"
            self._tell(SinkDropped(self.name, num_lost + num_unknown, reason))
        elif self.num_lost:
            self._tell(SinkDropped(self.name, self.num_lost, "it did not keep up"))

    def _wait(self, until: float) -> None:
        self._queue_end_mark(max(0.0, until - time.monotonic()))
        self._thread.join(max(0.0, until - time.monotonic()))

    def _has_sink_progressed_since_last_call(self) -> bool:
        return (
            isinstance(self._sink, AbandonableSink) and self._sink.has_progressed_since_last_call()
        )

    def _num_unwritten(self) -> int:
        """The number of events that the sink has not written; 1 while a sink that cannot say
        writes."""
        if isinstance(self._sink, AbandonableSink):
            return self._sink.num_unwritten
        return int(self._doing == "writes")

    def _queue_end_mark(self, timeout_s: float) -> None:
        """Put the mark behind which nothing comes, as soon as the queue has room for it."""
        if self._knows_the_end or not self._thread.is_alive():
            return
        # Without room `join` tries again, with the time that it has.
        with contextlib.suppress(queue.Full):
            if timeout_s:
                self._queue.put(None, timeout=timeout_s)
            else:
                self._queue.put_nowait(None)
            self._knows_the_end = True

    def _num_queued_events(self) -> int:
        with self._queue.mutex:
            # None is the mark of the end, no event.
            return sum(item is not None for item in self._queue.queue)

    def _write_queued_events(self) -> None:
        try:
            self._sink = sink = self._open_sink()
            if isinstance(sink, SinkWithMessages):
                sink.listen(self._print_sink_message)
            self._doing = "writes"
            while (envelope := self._queue.get()) is not None and not self._is_over:
                sink.write(envelope)
        # A user's sink may call sys.exit: the thread is all that it may end.
        except BaseException as error:
            self._drop_sink_after_error(error)
        else:
            self._close(sink)

    def _print_sink_message(self, words: str) -> None:
        self._tell(Note("sink", {"sink": self.name, "why": f"{self.name} {words}"}))

    def _drop_sink_after_error(self, error: BaseException) -> None:
        was_left = self._is_over
        self._is_over = True
        # Of a sink that was left behind, `join` has told already.
        if not was_left:
            self._tell(SinkDropped(self.name, self.num_lost, describe_sink_error(error)))
            # Told: `join` must not tell it again.
            self.num_lost = 0
        if self._sink is not None:
            with contextlib.suppress(BaseException):
                self._sink.close()

    def _close(self, sink: Sink) -> None:
        self._doing = "closes"
        try:
            sink.close()
        except BaseException as error:
            if not self._is_over:
                num_lost = self.num_lost + self._num_unwritten()
                self._tell(
                    SinkDropped(self.name, num_lost, f"on close: {describe_sink_error(error)}")
                )
                self.num_lost = 0


def describe_sink_error(error: BaseException) -> str:
    """ "RuntimeError: no room", or what a PhalanxError says."""
    if isinstance(error, PhalanxError):
        return str(error)
    return describe_foreign_error(error)
