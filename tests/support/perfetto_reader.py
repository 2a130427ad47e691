"""Reads traces back with the classes that Perfetto generates of its own .proto files, as its
trace processor does: interned names by sequence, slices by track."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

trace_pb = pytest.importorskip(
    "perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="perfetto is not installed"
)


@dataclass
class Slice:
    """A slice (or an instant, which has no length) with what it lies in."""

    track: Track
    name: str
    start_ns: int
    args: dict[str, Any]
    flows: tuple[int, ...] = ()
    flow_ends: tuple[int, ...] = ()
    parent: Slice | None = None
    end_ns: int = -1
    children: list[Slice] = field(default_factory=list)

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def self_ns(self) -> int:
        return self.ns - sum(child.ns for child in self.children)


@dataclass
class Track:
    name: str
    process: str
    is_bytes: bool = False
    slices: list[Slice] = field(default_factory=list)
    instants: list[Slice] = field(default_factory=list)
    values: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Interned:
    names: dict[int, str] = field(default_factory=dict)
    arg_names: dict[int, str] = field(default_factory=dict)
    arg_texts: dict[int, str] = field(default_factory=dict)

    def add(self, data: Any) -> None:
        for table, entries in (
            (self.names, data.event_names),
            (self.arg_names, data.debug_annotation_names),
        ):
            for entry in entries:
                assert entry.iid not in table
                table[entry.iid] = entry.name
        for entry in data.debug_annotation_string_values:
            self.arg_texts[entry.iid] = entry.str.decode()

    def args(self, annotations: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for each in annotations:
            name = self.arg_names[each.name_iid]
            if each.WhichOneof("value") == "string_value_iid":
                found[name] = self.arg_texts[each.string_value_iid]
            else:
                found[name] = each.int_value
        return found


class ReadTrace:
    """Tracks of a trace. AssertionError where a track is not in order, or slices are not nested."""

    def __init__(self, data: bytes) -> None:
        trace = trace_pb.Trace()
        trace.ParseFromString(data)
        self.tracks: dict[int, Track] = {}
        self._interned: dict[int, Interned] = {}
        self._open: dict[int, list[Slice]] = {}
        self._last_ns: dict[int, int] = {}
        self._processes: dict[int, str] = {}
        for packet in trace.packet:
            if packet.HasField("track_descriptor"):
                self._add_track(packet.track_descriptor)
            self._add_event(packet)
        assert not any(self._open.values()), "slices without an end"

    def _add_track(self, descriptor: Any) -> None:
        if descriptor.HasField("process"):
            self._processes[descriptor.uuid] = descriptor.process.process_name
            return
        process = self._processes.get(descriptor.parent_uuid, "")
        assert process or not descriptor.parent_uuid
        is_bytes = descriptor.counter.unit == trace_pb.CounterDescriptor.UNIT_SIZE_BYTES
        assert descriptor.uuid not in self.tracks
        self.tracks[descriptor.uuid] = Track(descriptor.name, process, is_bytes)

    def _add_event(self, packet: Any) -> None:
        if packet.sequence_flags & trace_pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED:
            self._interned[packet.trusted_packet_sequence_id] = Interned()
        if not packet.HasField("track_event"):
            return
        interned = self._interned[packet.trusted_packet_sequence_id]
        interned.add(packet.interned_data)
        event, now_ns = packet.track_event, packet.timestamp
        uuid = event.track_uuid
        track, stack = self.tracks[uuid], self._open.setdefault(uuid, [])
        assert now_ns >= self._last_ns.get(uuid, 0), "a track in order of time"
        self._last_ns[uuid] = now_ns
        if event.type == trace_pb.TrackEvent.TYPE_COUNTER:
            track.values.append((now_ns, event.counter_value))
        elif event.type == trace_pb.TrackEvent.TYPE_SLICE_END:
            stack.pop().end_ns = now_ns
        else:
            each = Slice(
                track,
                interned.names[event.name_iid],
                now_ns,
                interned.args(event.debug_annotations),
                tuple(event.flow_ids),
                tuple(event.terminating_flow_ids),
                stack[-1] if stack else None,
            )
            if event.type == trace_pb.TrackEvent.TYPE_INSTANT:
                track.instants.append(each)
                return
            assert event.type == trace_pb.TrackEvent.TYPE_SLICE_BEGIN
            track.slices.append(each)
            if stack:
                stack[-1].children.append(each)
            stack.append(each)

    def of_rank(self, rank: int, name: str = "") -> list[Track]:
        """Tracks of a rank named `name`; where there is none, those whose name begins so."""
        found = []
        for track in self.tracks.values():
            words = track.process.split()
            if words[:2] == ["rank", str(rank)] and track.name.startswith(name):
                found.append(track)
        return [track for track in found if track.name == name] or found

    def slices(self, rank: int, track: str) -> Iterator[Slice]:
        for each in self.of_rank(rank, track):
            yield from each.slices

    def about(self) -> dict[str, Any]:
        """What the trace says of itself."""
        (track,) = [track for track in self.tracks.values() if track.name == "about this trace"]
        (instant,) = track.instants
        return instant.args
