"""The envelope: an event with who said it and when, and its line of JSON.

An event is one line of JSON in `RUN/events/`: its own fields plus the envelope `event` (the class
in snake_case), `schema`, `time_unix_s`, `rank` and `attempt` (-1 for the supervisor's rank), `seq`
and `monotonic_s`. Wall clocks are stepped: `time_unix_s` is for people to read. What came first
follows from `seq`, which counts the events of a process, and from `monotonic_s`, which processes of
one machine share: the first event of each process names its clock (`clock`).
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

from phalanx.core.clocks import build_monotonic_clock_id
from phalanx.observe.events.base import Event

SCHEMA = 1
# Made once: `json.dumps` with options makes one for each line.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class MonotonicClockReading:
    """A process's monotonic clock: its name ("" in files of earlier releases), and its seconds at
    the first event."""

    name: str
    began_s: float


@dataclass(frozen=True)
class Envelope:
    """An event with who said it and when.

    `seq` and `monotonic_s` are -1 and NaN in files of earlier releases.

    `clock` is written with the first event of a process, and of a file; whoever reads a file hands
    it on to those that follow.
    """

    event: Event
    rank: int
    attempt: int
    time_unix_s: float
    seq: int = -1
    monotonic_s: float = math.nan
    clock: MonotonicClockReading | None = field(default=None, compare=False)

    schema: ClassVar[int] = SCHEMA

    def to_line(self, *, begins_file: bool = False) -> str:
        """One line of strict JSON; NaN and infinities become null."""
        head = {
            "event": self.event.kind(),
            "schema": SCHEMA,
            # Tenths of a millisecond do: within a process `seq` says what came first.
            "time_unix_s": round(self.time_unix_s, 4),
            "rank": self.rank,
            "attempt": self.attempt,
        }
        if self.seq >= 0:
            head |= {"seq": self.seq, "monotonic_s": round(self.monotonic_s, 4)}
        if (self.seq == 0 or begins_file) and self.clock is not None and self.clock.name:
            head["clock"] = self.clock.name
        body = head | vars(self.event)
        # Most events are finite: only the others pay for the walk through their values.
        try:
            return _ENCODER.encode(body)
        except ValueError:
            return _ENCODER.encode(_replace_nonfinite_by_null(body))


def wrap_event_in_envelope(
    event: Event, *, rank: int, attempt: int, seq: int = -1, begins_file: bool = False
) -> Envelope:
    """Put an event into the envelope of this moment; `seq` numbers those of a process."""
    now_s, names_clock = time.monotonic(), seq == 0 or begins_file
    return Envelope(
        event,
        rank,
        attempt,
        time.time(),
        seq,
        now_s,
        MonotonicClockReading(build_monotonic_clock_id(), now_s) if names_clock else None,
    )


def _replace_nonfinite_by_null(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _replace_nonfinite_by_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite_by_null(item) for item in value]
    return value
