"""Notes, and the events of the sinks themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phalanx.observe.events.base import Event

EVENTS_UNWRITTEN = "events_unwritten"  # code of the note that a disk refuses what is recorded
EVENTS_REMOVED = "events_removed"  # that someone has removed what was recorded
# code of the note with which a person's --resume begins; restarts have an event of their own
RESUMED = "resumed"


@dataclass(frozen=True)
class Note(Event):
    """A fact that has no class of its own; `code` is stable, `facts` is JSON."""

    code: str
    facts: dict[str, Any] = field(default_factory=dict)


def is_resume(event: Event) -> bool:
    """True for the note with which a person's --resume begins."""
    return isinstance(event, Note) and event.code == RESUMED


@dataclass(frozen=True)
class SinkDropped(Event):
    """A sink died or fell behind: it is out, or lost `num_dropped` events; training goes on."""

    sink: str
    num_dropped: int
    reason: str
