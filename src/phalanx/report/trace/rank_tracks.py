"""The tracks of one rank: steps with their phases, microbatches, actions, collectives, operators,
memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from phalanx.core.step_ranges import StepRange
from phalanx.observe.trace_part import TracePart
from phalanx.observe.trace_rows import CollectiveSpan, PhaseSpan, TracedGroup
from phalanx.report.trace.alignment import ClockAlignment
from phalanx.report.trace.arrows import MessageKey, build_message_key
from phalanx.report.trace.packets import (
    COUNTER,
    INSTANT,
    AnnotationValue,
    RankPackets,
    TrackEvent,
)
from phalanx.report.trace.spans import TrackSpan, assign_lanes, nest_spans

PROCESS_TRACK = 1
_UNKNOWN_GROUP = TracedGroup("", "a group that is not known", "")


class RankTracks:
    """Makes the packets of `part`, of its steps in `steps`."""

    def __init__(
        self,
        part: TracePart,
        steps: StepRange,
        alignment: ClockAlignment,
        messages: Mapping[MessageKey, int],
    ) -> None:
        self.num_spans = self.num_operators = 0
        self._part, self._steps = part, steps
        self._alignment, self._messages = alignment, messages
        self._packets = RankPackets(part.header.rank + 1)
        self._events: list[TrackEvent] = []
        self._num_tracks = PROCESS_TRACK
        step_rows = [row for row in part.of_kind("step") if self._has_step(row.step)]
        self._first_ns = min((row.start_ns for row in step_rows), default=0)
        self._last_ns = max((row.end_ns for row in step_rows), default=2**62)
        self.steps = sorted(row.step for row in step_rows)

    def build_packets(self) -> bytes:
        header = self._part.header
        name = f"rank {header.rank}"
        if header.coordinates:
            name += f" ({header.coordinates})"
        self._packets.add_process(PROCESS_TRACK, f"{name} on {header.host}, {header.device}")
        self._add_phases()
        self._add_microbatches()
        self._add_actions()
        self._add_collectives()
        self._add_operators()
        self._add_memory()
        # Stable: of events of one moment on one track the order stays.
        self._events.sort(key=lambda event: event.at_ns)
        self._packets.add_events(self._events)
        return self._packets.to_bytes()

    @property
    def first_ns(self) -> int | None:
        """The first moment of this rank, by the clock of rank 0; None where its part has nothing of
        these steps."""
        return min((event.at_ns for event in self._events), default=None)

    def _has_step(self, step: int) -> bool:
        return self._steps.first <= step <= self._steps.last

    def _align(self, at_ns: int) -> int:
        return self._alignment.to_reference_ns(at_ns)

    def _add_track(self, name: str, *, is_bytes: bool = False) -> int:
        self._num_tracks += 1
        self._packets.add_track(
            self._num_tracks,
            name,
            parent=PROCESS_TRACK,
            order=self._num_tracks,
            is_bytes=is_bytes,
        )
        return self._num_tracks

    def _add_spans(self, track: int, spans: Sequence[TrackSpan]) -> None:
        self.num_spans += len(spans)
        self._events += nest_spans(track, spans)

    def _add_phases(self) -> None:
        spans = []
        for row in self._part.of_kind("step"):
            if self._has_step(row.step):
                start_ns, end_ns = self._align(row.start_ns), self._align(row.end_ns)
                spans.append(TrackSpan(start_ns, end_ns, f"step {row.step}", {"step": row.step}))
        spans += self._build_phase_spans(is_foreground=1)
        if spans:
            self._add_spans(self._add_track("phases"), spans)
        background_spans = self._build_phase_spans(is_foreground=0)
        if background_spans:
            self._add_spans(self._add_track("phases beside training"), background_spans)

    def _build_phase_spans(self, *, is_foreground: int) -> list[TrackSpan]:
        spans = []
        # A rank writes a phase where it ends: of two with the same times the outer comes later.
        for row in reversed(self._list_phase_rows()):
            if row.is_foreground != is_foreground:
                continue
            annotations: dict[str, AnnotationValue] = {"step": row.step}
            if row.microbatch >= 0:
                annotations["microbatch"] = row.microbatch
            if row.words:
                annotations["of"] = row.words
            if row.axis:
                annotations["axis"] = row.axis
            start_ns, end_ns = self._align(row.start_ns), self._align(row.end_ns)
            spans.append(TrackSpan(start_ns, end_ns, row.name, annotations))
        return spans

    def _list_phase_rows(self) -> list[PhaseSpan]:
        return [row for row in self._part.of_kind("phase") if self._has_step(row.step)]

    def _add_microbatches(self) -> None:
        """From the first phase of a microbatch to its last; of a pipeline they overlap, and its
        actions tell them."""
        if self._part.of_kind("action"):
            return
        ends: dict[tuple[int, int], list[int]] = {}
        for row in self._list_phase_rows():
            if row.microbatch >= 0:
                ends.setdefault((row.step, row.microbatch), []).extend((row.start_ns, row.end_ns))
        spans = []
        for (step, microbatch), times in sorted(ends.items()):
            start_ns, end_ns = self._align(min(times)), self._align(max(times))
            name = f"microbatch {microbatch}"
            spans.append(TrackSpan(start_ns, end_ns, name, {"step": step}))
        if spans:
            self._add_spans(self._add_track("microbatches"), spans)

    def _add_actions(self) -> None:
        spans = []
        for row in self._part.of_kind("action"):
            if self._has_step(row.step):
                start_ns, end_ns = self._align(row.start_ns), self._align(row.end_ns)
                spans.append(TrackSpan(start_ns, end_ns, row.action, {"step": row.step}))
        if spans:
            self._add_spans(self._add_track("pipeline actions"), spans)

    def _add_collectives(self) -> None:
        by_track: dict[str, list[CollectiveSpan]] = {}
        for row in self._part.of_kind("collective"):
            if self._has_step(row.step):
                by_track.setdefault(self._name_collective_track(row), []).append(row)
        for name, rows in sorted(by_track.items()):
            self._add_collectives_in_lanes(name, rows)

    def _find_group(self, row: CollectiveSpan) -> TracedGroup:
        groups: list[TracedGroup] = self._part.of_kind("group")
        if 0 <= row.group < len(groups):
            return groups[row.group]
        return _UNKNOWN_GROUP

    def _name_collective_track(self, row: CollectiveSpan) -> str:
        name = f"collectives of {self._find_group(row).label}"
        axes = self._part.header.coordinates.split(", ")
        if self._find_group(row).label == "world" and len(axes) == 1 and axes[0]:
            # An axis of all ranks has no group of its own.
            name += f" ({axes[0].split()[0]})"
        if not row.is_foreground:
            name += ", beside training"
        return name

    def _add_collectives_in_lanes(self, name: str, rows: Sequence[CollectiveSpan]) -> None:
        """Collectives of one group overlap: each track of the same name has some of them."""
        queued = [row for row in rows if row.end_seen == "queued"]
        timed = [row for row in rows if row.end_seen != "queued"]
        times = [(row.posted_ns, self._find_end_ns(row)) for row in timed]
        spans_by_lane: dict[int, list[TrackSpan]] = {}
        for row, lane in zip(timed, assign_lanes(times), strict=True):
            spans_by_lane.setdefault(lane, []).extend(self._build_collective_spans(row))
        for _, spans in sorted(spans_by_lane.items()):
            self._add_spans(self._add_track(name), spans)
        if queued:
            track = self._add_track(f"{name}, queued on the device")
            for row in queued:
                annotations = self._annotate_collective(row)
                at_ns = self._align(row.posted_ns)
                self._events.append(TrackEvent(at_ns, INSTANT, track, row.op, annotations))

    def _find_end_ns(self, row: CollectiveSpan) -> int:
        """The end of a collective; the end of the steps where it was not seen."""
        if row.end_ns >= 0:
            return row.end_ns
        return max(row.posted_ns, min(self._last_ns, 2**62))

    def _build_collective_spans(self, row: CollectiveSpan) -> list[TrackSpan]:
        """A collective from posting to its end, and inside it the wait for it."""
        end_ns = self._find_end_ns(row)
        start, end = self._align(row.posted_ns), self._align(end_ns)
        key = build_message_key(self._part, row)
        flow = self._messages.get(key, 0) if key is not None else 0
        sent_flow = flow if row.op == "send" else 0
        spans = [TrackSpan(start, end, row.op, self._annotate_collective(row), flow=sent_flow)]
        if 0 <= row.wait_ns < end_ns:
            spans.append(TrackSpan(self._align(row.wait_ns), end, "wait"))
        if flow and row.op == "recv":
            # A receive is often posted before its message is sent: the arrow leads to its end.
            spans.append(TrackSpan(max(start, end - 1), end, "arrived", flow_end=flow))
        return spans

    def _annotate_collective(self, row: CollectiveSpan) -> dict[str, AnnotationValue]:
        group = self._find_group(row)
        annotations: dict[str, AnnotationValue] = {
            "group": group.label,
            "ranks": group.ranks,
            "sequence": row.sequence,
            "bytes": row.num_bytes,
            "type": row.dtype,
            "tensors": row.num_tensors,
            "step": row.step,
            "end": row.end_seen,
        }
        if row.peer >= 0:
            annotations["peer"] = row.peer
        if row.tag > 0:
            annotations["tag"] = row.tag
        if row.microbatch >= 0:
            annotations["microbatch"] = row.microbatch
        if row.phase:
            annotations["posted in"] = row.phase
        if row.site:
            annotations["line"] = row.site
        return annotations

    def _is_within(self, at_ns: int) -> bool:
        return self._first_ns <= at_ns <= self._last_ns

    def _add_operators(self) -> None:
        by_lane: dict[str, list[TrackSpan]] = {}
        for row in self._part.of_kind("operator"):
            if self._is_within(row.start_ns):
                span = TrackSpan(self._align(row.start_ns), self._align(row.end_ns), row.name)
                by_lane.setdefault(row.lane, []).append(span)
        for lane, spans in sorted(by_lane.items()):
            self.num_operators += len(spans)
            self._add_spans(self._add_track(lane), spans)

    def _add_memory(self) -> None:
        samples = [row for row in self._part.of_kind("memory") if self._is_within(row.at_ns)]
        resident = [(row.at_ns, row.resident_bytes) for row in samples]
        allocated = [(row.at_ns, row.allocated_bytes) for row in samples]
        self._add_counter("resident memory", resident)
        self._add_counter("memory of the device's allocator", allocated)

    def _add_counter(self, name: str, values: Iterable[tuple[int, int]]) -> None:
        known = [(at_ns, value) for at_ns, value in values if value >= 0]
        if not known:
            return
        track = self._add_track(name, is_bytes=True)
        for at_ns, value in known:
            self._events.append(TrackEvent(self._align(at_ns), COUNTER, track, value=value))
