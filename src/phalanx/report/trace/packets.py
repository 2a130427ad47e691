"""Packets of a Perfetto trace: tracks, and slices, instants and counters on them (TrackEvent).

Field numbers are those of protos/perfetto/trace in https://github.com/google/perfetto (v59). Names
are written once for each rank and referred to by number after that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from phalanx.report.trace.proto_message import ProtoMessage

SLICE_BEGIN, SLICE_END, INSTANT, COUNTER = 1, 2, 3, 4
_ORDER_IS_EXPLICIT = 3
_UNIT_BYTES = 3
_STATE_CLEARED, _NEEDS_STATE = 1, 2

AnnotationValue = int | str
Annotations = Mapping[str, AnnotationValue]
NO_ANNOTATIONS: Annotations = {}


class TrackEvent(NamedTuple):
    """An event on the track with number `track`. `flow` begins an arrow and `flow_end` ends one, 0:
    none."""

    at_ns: int
    type: int
    track: int
    name: str = ""
    annotations: Annotations = NO_ANNOTATIONS
    value: int = 0
    flow: int = 0
    flow_end: int = 0


class RankPackets:
    """The packets of one rank, which have one sequence and one table of names."""

    def __init__(self, sequence: int) -> None:
        self._sequence = sequence
        self._packets = bytearray()
        self._has_cleared_state = False
        self._names: dict[str, int] = {}
        self._annotation_names: dict[str, int] = {}
        self._annotation_texts: dict[str, int] = {}

    def to_bytes(self) -> bytes:
        return bytes(self._packets)

    def add_process(self, track: int, name: str) -> None:
        """A group of tracks that is shown as a process, in the order in which they have ranks."""
        process = ProtoMessage().add_int(1, self._sequence).add_text(6, name)
        descriptor = ProtoMessage().add_int(1, self._globalise(track)).add_message(3, process)
        descriptor.add_int(11, _ORDER_IS_EXPLICIT)
        self._add_packet(ProtoMessage().add_message(60, descriptor))

    def add_track(
        self, track: int, name: str, *, parent: int | None, order: int, is_bytes: bool = False
    ) -> None:
        """A track below `parent` (None: at the top), at place `order`; with `is_bytes` a counter of
        bytes."""
        descriptor = ProtoMessage().add_int(1, self._globalise(track)).add_text(2, name)
        if parent is not None:
            descriptor.add_int(5, self._globalise(parent))
        if is_bytes:
            descriptor.add_message(8, ProtoMessage().add_int(3, _UNIT_BYTES))
        descriptor.add_int(12, order)
        self._add_packet(ProtoMessage().add_message(60, descriptor))

    def add_events(self, events: Iterable[TrackEvent]) -> None:
        """Events, which are in the order of their times."""
        for event in events:
            self._add_event(event)

    def _add_event(self, event: TrackEvent) -> None:
        new_names = ProtoMessage()
        body = ProtoMessage().add_int(9, event.type).add_int(11, self._globalise(event.track))
        if event.name:
            body.add_int(10, self._intern(self._names, event.name, 2, new_names))
        for name, value in event.annotations.items():
            body.add_message(4, self._build_annotation(name, value, new_names))
        if event.type == COUNTER:
            body.add_int(30, event.value)
        if event.flow:
            body.add_fixed64(47, event.flow)
        if event.flow_end:
            body.add_fixed64(48, event.flow_end)
        packet = ProtoMessage().add_int(8, event.at_ns).add_message(11, body)
        if new_names.data:
            packet.add_message(12, new_names)
        self._add_packet(packet)

    def _build_annotation(
        self, name: str, value: AnnotationValue, new_names: ProtoMessage
    ) -> ProtoMessage:
        annotation = ProtoMessage().add_int(
            1, self._intern(self._annotation_names, name, 3, new_names)
        )
        if isinstance(value, int):
            return annotation.add_int(4, value)
        return annotation.add_int(17, self._intern(self._annotation_texts, value, 29, new_names))

    @staticmethod
    def _intern(table: dict[str, int], text: str, field: int, new_names: ProtoMessage) -> int:
        """Number of `text` in a table; a new one is written to `new_names`."""
        number = table.get(text)
        if number is None:
            number = table[text] = len(table) + 1
            new_names.add_message(field, ProtoMessage().add_int(1, number).add_text(2, text))
        return number

    def _globalise(self, track: int) -> int:
        return self._sequence << 24 | track

    def _add_packet(self, packet: ProtoMessage) -> None:
        flags = _NEEDS_STATE
        if not self._has_cleared_state:
            # Names begin anew with the first packet of a sequence.
            flags |= _STATE_CLEARED
            self._has_cleared_state = True
        packet.add_int(10, self._sequence).add_int(13, flags)
        self._packets += ProtoMessage().add_message(1, packet).data
