"""Spans of time on a track of a trace, where one must lie inside another or beside it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from phalanx.report.trace.packets import (
    NO_ANNOTATIONS,
    SLICE_BEGIN,
    SLICE_END,
    Annotations,
    TrackEvent,
)


class TrackSpan(NamedTuple):
    """A span to be drawn. `flow` begins an arrow at its start, `flow_end` ends one there."""

    start_ns: int
    end_ns: int
    name: str
    annotations: Annotations = NO_ANNOTATIONS
    flow: int = 0
    flow_end: int = 0


def nest_spans(track: int, spans: Sequence[TrackSpan]) -> Iterator[TrackEvent]:
    """Begins and ends of `spans` on one track, in order.

    One that begins inside another ends with it at the latest: clocks of profilers are off by
    nanoseconds. Of two with the same times the first one is the outer.
    """
    open_ends: list[int] = []
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        while open_ends and open_ends[-1] <= span.start_ns:
            yield TrackEvent(open_ends.pop(), SLICE_END, track)
        end_ns = max(span.end_ns, span.start_ns)
        if open_ends:
            end_ns = min(end_ns, open_ends[-1])
        yield TrackEvent(
            span.start_ns,
            SLICE_BEGIN,
            track,
            span.name,
            span.annotations,
            flow=span.flow,
            flow_end=span.flow_end,
        )
        open_ends.append(end_ns)
    while open_ends:
        yield TrackEvent(open_ends.pop(), SLICE_END, track)


def assign_lanes(spans: Sequence[tuple[int, int]]) -> list[int]:
    """The lane of each span (start, end), so that those of one lane do not overlap; as few lanes as
    that takes."""
    lanes = [0] * len(spans)
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    num_lanes = 0
    for index in sorted(range(len(spans)), key=lambda index: spans[index]):
        start, end = spans[index]
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, num_lanes = num_lanes, num_lanes + 1
        lanes[index] = lane
        heapq.heappush(busy, (max(end, start), lane))
    return lanes
