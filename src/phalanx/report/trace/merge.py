"""One file for Perfetto of the parts of all ranks, and what it does not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from phalanx.core.step_ranges import StepRange
from phalanx.core.typed_json import JsonRecord
from phalanx.observe.trace_part import (
    TracePart,
    TracePartError,
    TracePartHeader,
    TracePartPath,
    list_trace_parts,
    read_trace_part,
)
from phalanx.report.trace.alignment import ClockAlignment
from phalanx.report.trace.arrows import MessageEnds, MessageKey
from phalanx.report.trace.packets import INSTANT, RankPackets, TrackEvent
from phalanx.report.trace.rank_tracks import PROCESS_TRACK, RankTracks

NANOSECONDS_PER_S = 1e9


@dataclass(frozen=True)
class UnreadablePart(JsonRecord):
    """A file that is no part of a trace, and why."""

    file: str
    why: str


@dataclass(frozen=True)
class TraceFacts(JsonRecord):
    """The contents of a trace, and what it lacks.

    `missing_ranks` have no part that can be read; `unfinished_ranks` stopped before the last step;
    `unaligned_ranks` have another clock than rank 0, and no offset to it was measured.
    `clock_error_s`: how far times of different ranks may be off, 0 where all have one clock.
    """

    first_step: int
    last_step: int
    attempt: int
    world_size: int
    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    unfinished_ranks: tuple[int, ...]
    unaligned_ranks: tuple[int, ...]
    unreadable: tuple[UnreadablePart, ...]
    num_spans: int
    num_operators: int
    num_collectives: int
    num_arrows: int
    num_dropped: int
    num_unreadable_lines: int
    num_clocks: int
    clock_error_s: float


def list_traced_steps(run_dir: Path) -> dict[tuple[int, StepRange], list[TracePartPath]]:
    """The parts of each attempt and window of steps; the newest attempt comes last."""
    windows: dict[tuple[int, StepRange], list[TracePartPath]] = {}
    for part in list_trace_parts(run_dir):
        windows.setdefault((part.attempt, part.steps), []).append(part)
    return dict(sorted(windows.items()))


def find_parts_of_steps(run_dir: Path, steps: StepRange) -> list[TracePartPath]:
    """The parts of the newest attempt that was to trace all of `steps`; none if none was."""
    newest: list[TracePartPath] = []
    for (_, window), parts in list_traced_steps(run_dir).items():
        if window.first <= steps.first and steps.last <= window.last:
            newest = parts
    return newest


def merge_trace_parts(
    paths: Sequence[TracePartPath],
    steps: StepRange,
    write: Callable[[bytes], object],
    tell: Callable[[int, int], None] = lambda num_done, num_total: None,
) -> TraceFacts:
    """Write the trace of `steps` as Perfetto's protocol buffer, rank by rank; returns its facts.

    Parts are read twice, so that one is in memory at a time: first for the ends of arrows. `tell`
    learns how many of how many reads are done. Raises TracePartError if no part can be read.
    """
    ends = MessageEnds(steps)
    unreadable: list[UnreadablePart] = []
    readable: list[TracePartPath] = []
    for path in paths:
        try:
            ends.add_part(_read_part_of_rank(path))
            readable.append(path)
        except TracePartError as error:
            unreadable.append(UnreadablePart(path.path.name, str(error)))
        tell(len(readable), 2 * len(paths))
    if not readable:
        raise TracePartError("; ".join(f"{each.file}: {each.why}" for each in unreadable))
    messages = ends.number_messages()
    ranks: dict[int, TracedRank] = {}
    for path in readable:
        traced, packets = _build_packets_of_rank(_read_part_of_rank(path), steps, messages)
        write(packets)
        ranks[path.rank] = traced
        tell(len(readable) + len(ranks), 2 * len(paths))
    facts = _collect_facts(ranks, steps, tuple(unreadable), len(messages))
    first_ns = min((at for each in ranks.values() if (at := each.first_ns) is not None), default=0)
    for rank in facts.missing_ranks:
        write(_build_packets_of_missing_rank(rank, first_ns))
    write(_build_packets_about(facts, first_ns))
    return facts


class TracedRank(NamedTuple):
    """The facts that stay of a part that was written."""

    header: TracePartHeader
    steps: Sequence[int]
    first_ns: int | None
    num_spans: int
    num_operators: int
    num_collectives: int
    num_dropped: int
    num_unreadable: int
    is_aligned: bool
    clock_error_ns: int


def _read_part_of_rank(path: TracePartPath) -> TracePart:
    part = read_trace_part(path.path)
    if part.header.rank != path.rank:
        raise TracePartError(f"its header is of rank {part.header.rank}")
    return part


def _build_packets_of_rank(
    part: TracePart, steps: StepRange, messages: Mapping[MessageKey, int]
) -> tuple[TracedRank, bytes]:
    alignment = ClockAlignment(part)
    tracks = RankTracks(part, steps, alignment, messages)
    packets = tracks.build_packets()
    num_collectives = 0
    for row in part.of_kind("collective"):
        num_collectives += steps.first <= row.step <= steps.last
    traced = TracedRank(
        part.header,
        tracks.steps,
        tracks.first_ns,
        tracks.num_spans,
        tracks.num_operators,
        num_collectives,
        part.num_dropped,
        part.num_unreadable,
        alignment.is_aligned,
        alignment.error_ns,
    )
    return traced, packets


def _collect_facts(
    ranks: Mapping[int, TracedRank],
    steps: StepRange,
    unreadable: tuple[UnreadablePart, ...],
    num_arrows: int,
) -> TraceFacts:
    parts_read = list(ranks.values())
    world_size = max(each.header.world_size for each in parts_read)
    unfinished = [rank for rank, each in sorted(ranks.items()) if steps.last not in each.steps]
    unaligned = [rank for rank, each in sorted(ranks.items()) if not each.is_aligned]
    return TraceFacts(
        first_step=steps.first,
        last_step=steps.last,
        attempt=parts_read[0].header.attempt,
        world_size=world_size,
        ranks=tuple(sorted(ranks)),
        missing_ranks=tuple(rank for rank in range(world_size) if rank not in ranks),
        unfinished_ranks=tuple(unfinished),
        unaligned_ranks=tuple(unaligned),
        unreadable=unreadable,
        num_spans=sum(each.num_spans for each in parts_read),
        num_operators=sum(each.num_operators for each in parts_read),
        num_collectives=sum(each.num_collectives for each in parts_read),
        num_arrows=num_arrows,
        num_dropped=sum(each.num_dropped for each in parts_read),
        num_unreadable_lines=sum(each.num_unreadable for each in parts_read),
        num_clocks=len({each.header.clock for each in parts_read}),
        clock_error_s=max(each.clock_error_ns for each in parts_read) / NANOSECONDS_PER_S,
    )


def _build_packets_of_missing_rank(rank: int, at_ns: int) -> bytes:
    """A process without spans, so that whoever looks sees that a rank is missing."""
    packets = RankPackets(rank + 1)
    packets.add_process(PROCESS_TRACK, f"rank {rank}: it left no part of the trace")
    packets.add_track(2, "missing", parent=PROCESS_TRACK, order=1)
    packets.add_events([TrackEvent(at_ns, INSTANT, 2, "no part of this rank")])
    return packets.to_bytes()


def _build_packets_about(facts: TraceFacts, at_ns: int) -> bytes:
    """A track of its own that says what the trace has and what it lacks."""
    packets = RankPackets(facts.world_size + 1)
    packets.add_track(PROCESS_TRACK, "about this trace", parent=None, order=0)
    annotations: dict[str, int | str] = {}
    for name, value in facts.to_json().items():
        annotations[name] = value if isinstance(value, int) else str(value)
    packets.add_events([TrackEvent(at_ns, INSTANT, PROCESS_TRACK, "phalanx trace", annotations)])
    return packets.to_bytes()
