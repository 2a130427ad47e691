"""Packets of a Perfetto trace: tracks, and slices, instants and counters on them (TrackEvent).

Field numbers are those of protos/perfetto/trace in https://github.com/google/perfetto (v59). Names
are written once for each rank and referred to by number after that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from phalanx.report.trace.proto_message import (
    LENGTH_DELIMITED,
    VARINT,
    ProtoMessage,
    encode_key,
    encode_varint,
)

SLICE_BEGIN, SLICE_END, INSTANT, COUNTER = 1, 2, 3, 4
_ORDER_IS_EXPLICIT = 3
_UNIT_BYTES = 3
_STATE_CLEARED, _NEEDS_STATE = 1, 2
_PACKET_KEY = encode_key(1, LENGTH_DELIMITED)
_TIMESTAMP_KEY = encode_key(8, VARINT)
_TRACK_EVENT_KEY = encode_key(11, LENGTH_DELIMITED)
_COUNTER_VALUE_KEY = encode_key(30, VARINT)

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
        self._end_of_packet = self._encode_end_of_packet(_NEEDS_STATE)
        self._new_names = ProtoMessage()
        self._beginnings: dict[tuple[int, int], bytes] = {}
        self._encoded_names: dict[str, bytes] = {}
        self._encoded_annotations: dict[tuple[str, AnnotationValue], bytes] = {}
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
        self._add_packet(ProtoMessage().add_message(60, descriptor).data)

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
        self._add_packet(ProtoMessage().add_message(60, descriptor).data)

    def add_events(self, events: Iterable[TrackEvent]) -> None:
        """Events, which are in the order of their times."""
        for event in events:
            self._add_event(event)

    def _add_event(self, event: TrackEvent) -> None:
        # Millions of them: what comes again, all but times, is encoded once.
        body: list[bytes | bytearray] = [self._encode_beginning(event.type, event.track)]
        if event.name:
            body.append(self._encode_name(event.name))
        for item in event.annotations.items():
            body.append(self._encode_annotation(item))
        if event.type == COUNTER:
            body += (_COUNTER_VALUE_KEY, encode_varint(event.value))
        if event.flow:
            body.append(ProtoMessage().add_fixed64(47, event.flow).data)
        if event.flow_end:
            body.append(ProtoMessage().add_fixed64(48, event.flow_end).data)
        data = b"".join(body)
        parts: list[bytes | bytearray] = [
            _TIMESTAMP_KEY,
            encode_varint(event.at_ns),
            _TRACK_EVENT_KEY,
        ]
        parts += (encode_varint(len(data)), data)
        if self._new_names.data:
            parts.append(ProtoMessage().add_message(12, self._new_names).data)
            self._new_names = ProtoMessage()
        self._add_packet(b"".join(parts))

    def _encode_beginning(self, event_type: int, track: int) -> bytes:
        encoded = self._beginnings.get((event_type, track))
        if encoded is None:
            message = ProtoMessage().add_int(9, event_type).add_int(11, self._globalise(track))
            encoded = self._beginnings[event_type, track] = bytes(message.data)
        return encoded

    def _encode_name(self, name: str) -> bytes:
        encoded = self._encoded_names.get(name)
        if encoded is None:
            message = ProtoMessage().add_int(10, self._intern(self._names, name, 2))
            encoded = self._encoded_names[name] = bytes(message.data)
        return encoded

    def _encode_annotation(self, item: tuple[str, AnnotationValue]) -> bytes:
        encoded = self._encoded_annotations.get(item)
        if encoded is not None:
            return encoded
        name, value = item
        annotation = ProtoMessage().add_int(1, self._intern(self._annotation_names, name, 3))
        if isinstance(value, int):
            annotation.add_int(4, value)
        else:
            annotation.add_int(17, self._intern(self._annotation_texts, value, 29))
        encoded = bytes(ProtoMessage().add_message(4, annotation).data)
        self._encoded_annotations[item] = encoded
        return encoded

    def _intern(self, table: dict[str, int], text: str, field: int) -> int:
        """Number of `text` in a table; a new one is written with the event that is being made."""
        number = table.get(text)
        if number is None:
            number = table[text] = len(table) + 1
            self._new_names.add_message(field, ProtoMessage().add_int(1, number).add_text(2, text))
        return number

    def _globalise(self, track: int) -> int:
        return self._sequence << 24 | track

    def _add_packet(self, packet: bytes | bytearray) -> None:
        end = self._end_of_packet
        if not self._packets:
            # Names begin anew with the first packet of a sequence.
            end = self._encode_end_of_packet(_NEEDS_STATE | _STATE_CLEARED)
        self._packets += _PACKET_KEY
        self._packets += encode_varint(len(packet) + len(end))
        self._packets += packet
        self._packets += end

    def _encode_end_of_packet(self, flags: int) -> bytes:
        return bytes(ProtoMessage().add_int(10, self._sequence).add_int(13, flags).data)
