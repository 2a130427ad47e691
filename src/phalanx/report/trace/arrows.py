"""Arrows from a send to the receive that takes it."""

from __future__ import annotations

from collections.abc import Iterable
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


def number_messages(parts: Iterable[TracePart], steps: StepRange) -> dict[MessageKey, int]:
    """Numbers from 1 of the messages of `steps` of which both ends are in `parts`."""
    ends: dict[str, set[MessageKey]] = {"send": set(), "recv": set()}
    for part in parts:
        for row in part.of_kind("collective"):
            if not steps.first <= row.step <= steps.last:
                continue
            key = build_message_key(part, row)
            # A receive that was not seen to end has no moment that an arrow could lead to.
            if key is not None and (row.op == "send" or row.end_ns >= 0):
                ends[row.op].add(key)
    numbers: dict[MessageKey, int] = {}
    for key in sorted(ends["send"] & ends["recv"]):
        numbers[key] = len(numbers) + 1
    return numbers
