"""One file for Perfetto of the parts of all ranks, and what it does not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.step_ranges import StepRange
from phalanx.core.typed_json import JsonRecord
from phalanx.observe.trace_part import (
    TracePart,
    TracePartError,
    TracePartPath,
    list_trace_parts,
    read_trace_part,
)
from phalanx.report.trace.alignment import ClockAlignment
from phalanx.report.trace.arrows import number_messages
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
    """What a trace has and what it lacks.

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


def merge_trace_parts(paths: Sequence[TracePartPath], steps: StepRange) -> tuple[bytes, TraceFacts]:
    """The trace of `steps` as Perfetto's protocol buffer, and its facts.

    Raises TracePartError if no part can be read.
    """
    parts, unreadable = _read_parts(paths)
    if not parts:
        raise TracePartError("; ".join(f"{each.file}: {each.why}" for each in unreadable))
    messages = number_messages(parts.values(), steps)
    alignments = {rank: ClockAlignment(part) for rank, part in parts.items()}
    tracks: dict[int, RankTracks] = {}
    packets = []
    for rank, part in parts.items():
        tracks[rank] = RankTracks(part, steps, alignments[rank], messages)
        packets.append(tracks[rank].build_packets())
    facts = _collect_facts(parts, steps, tracks, alignments, unreadable, len(messages))
    first_ns = min(each.first_ns for each in tracks.values())
    packets += [_build_packets_of_missing_rank(rank, first_ns) for rank in facts.missing_ranks]
    packets.append(_build_packets_about(facts, first_ns))
    return b"".join(packets), facts


def _read_parts(
    paths: Sequence[TracePartPath],
) -> tuple[dict[int, TracePart], tuple[UnreadablePart, ...]]:
    parts: dict[int, TracePart] = {}
    unreadable = []
    for path in paths:
        try:
            part = read_trace_part(path.path)
            if part.header.rank != path.rank:
                raise TracePartError(f"its header is of rank {part.header.rank}")
            parts[path.rank] = part
        except TracePartError as error:
            unreadable.append(UnreadablePart(path.path.name, str(error)))
    return parts, tuple(unreadable)


def _collect_facts(
    parts: Mapping[int, TracePart],
    steps: StepRange,
    tracks: Mapping[int, RankTracks],
    alignments: Mapping[int, ClockAlignment],
    unreadable: tuple[UnreadablePart, ...],
    num_arrows: int,
) -> TraceFacts:
    headers = [part.header for part in parts.values()]
    world_size = max(header.world_size for header in headers)
    unfinished = []
    for rank, each in tracks.items():
        if steps.last not in each.steps:
            unfinished.append(rank)
    num_collectives = 0
    for part in parts.values():
        for row in part.of_kind("collective"):
            num_collectives += steps.first <= row.step <= steps.last
    return TraceFacts(
        first_step=steps.first,
        last_step=steps.last,
        attempt=headers[0].attempt,
        world_size=world_size,
        ranks=tuple(sorted(parts)),
        missing_ranks=tuple(rank for rank in range(world_size) if rank not in parts),
        unfinished_ranks=tuple(sorted(unfinished)),
        unaligned_ranks=tuple(
            rank for rank, each in sorted(alignments.items()) if not each.is_aligned
        ),
        unreadable=unreadable,
        num_spans=sum(each.num_spans for each in tracks.values()),
        num_operators=sum(each.num_operators for each in tracks.values()),
        num_collectives=num_collectives,
        num_arrows=num_arrows,
        num_dropped=sum(part.num_dropped for part in parts.values()),
        num_unreadable_lines=sum(part.num_unreadable for part in parts.values()),
        num_clocks=len({header.clock for header in headers}),
        clock_error_s=max(each.error_ns for each in alignments.values()) / NANOSECONDS_PER_S,
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
