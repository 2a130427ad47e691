"""Arrows from a send to the receive that takes it."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.core.step_ranges import StepRange
from phalanx.observe.trace_part import TracePart
from phalanx.observe.trace_rows import CollectiveSpan


class MessageKey(NamedTuple):
    """A message between two ranks; `sequence` counts those of one group, direction and tag."""

    group: str
    source: int
    target: int
    tag: int
    sequence: int


def build_message_key(part: TracePart, row: CollectiveSpan) -> MessageKey | None:
    """The message that a send or a receive is; None for others, and where a peer is not known."""
    groups = part.of_kind("group")
    if row.op not in ("send", "recv") or row.peer < 0 or not 0 <= row.group < len(groups):
        return None
    source, target = part.header.rank, row.peer
    if row.op == "recv":
        source, target = target, source
    return MessageKey(groups[row.group].key, source, target, row.tag, row.sequence)


class MessageEnds:
    """The sends and receives of `steps`, of all parts that were added."""

    def __init__(self, steps: StepRange) -> None:
        self._steps = steps
        self._sends: set[MessageKey] = set()
        self._receives: set[MessageKey] = set()

    def add_part(self, part: TracePart) -> None:
        for row in part.of_kind("collective"):
            if not self._steps.first <= row.step <= self._steps.last:
                continue
            key = build_message_key(part, row)
            if key is None:
                continue
            if row.op == "send":
                self._sends.add(key)
            elif row.end_ns >= 0:
                # One that was not seen to end has no moment that an arrow could lead to.
                self._receives.add(key)

    def number_messages(self) -> dict[MessageKey, int]:
        """Numbers from 1 of the messages of which both ends are known."""
        numbers: dict[MessageKey, int] = {}
        for key in sorted(self._sends & self._receives):
            numbers[key] = len(numbers) + 1
        return numbers
