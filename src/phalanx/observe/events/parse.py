"""Reads an event back from its line, whichever release wrote it, and knows the class of each
kind."""

from __future__ import annotations

import json
import math
from typing import Any

from phalanx.observe.events import (
    checkpoints,
    checks,
    data,
    evaluation,
    measurements,
    notes,
    run,
    steps,
    supervision,
)
from phalanx.observe.events.base import Event
from phalanx.observe.events.envelope import SCHEMA, Envelope, MonotonicClockReading

# A new family is added here; its events are found by themselves. The reference has this order.
FAMILIES = (
    run,
    steps,
    evaluation,
    checkpoints,
    measurements,
    checks,
    supervision,
    data,
    notes,
)


def _map_kinds_to_classes() -> dict[str, type[Event]]:
    """The class of each kind of event, in the order in which the families define them."""
    classes = {}
    for family in FAMILIES:
        for member in vars(family).values():
            if isinstance(member, type) and issubclass(member, Event) and member is not Event:
                classes[member.kind()] = member
    return classes


EVENT_CLASS_OF_KIND = _map_kinds_to_classes()
_ENVELOPE_KEYS = frozenset(
    ("event", "schema", "time_unix_s", "rank", "attempt", "seq", "monotonic_s", "clock")
)
_decode_beginning = json.JSONDecoder().raw_decode


def _parse_json(line: str) -> Any:
    """As `json.loads`, faster for what begins with a brace and ends with a newline."""
    if line.startswith("{"):
        value, end = _decode_beginning(line)
        if line[end:] in ("", "\n"):
            return value
    return json.loads(line)


def parse_event_line(line: str, clock: MonotonicClockReading | None = None) -> Envelope | None:
    """The envelope of one line, or None for a line that is torn, or of a kind or a schema that this
    release does not know: numbers of a later schema may mean something else.

    `clock` is that of the line before in the same file; a line with which a process begins has its
    own.
    """
    try:
        body = _parse_json(line)
        cls = EVENT_CLASS_OF_KIND[body["event"]]
        if body.get("schema", SCHEMA) > SCHEMA:
            return None
        seq, steady_s = body.get("seq", -1), body.get("monotonic_s", math.nan)
        fields = {name: value for name, value in body.items() if name not in _ENVELOPE_KEYS}
        # Most events are of this release, and finite: only the others pay for a look at each value.
        if fields.keys() != cls.__dataclass_fields__.keys() or None in fields.values():
            # What a later release added is left out; what an earlier one lacks takes its default.
            fields = {name: body[name] for name in cls.__dataclass_fields__ if name in body}
            fields = {name: math.nan if value is None else value for name, value in fields.items()}
        # Whoever begins in the middle of a file takes the clock of the first line that is read.
        if seq >= 0 and (seq == 0 or clock is None):
            name = body.get("clock")
            clock = MonotonicClockReading(name if type(name) is str else "", steady_s)
        return Envelope(
            cls(**fields), body["rank"], body["attempt"], body["time_unix_s"], seq, steady_s, clock
        )
    except (ValueError, KeyError, TypeError):
        return None
