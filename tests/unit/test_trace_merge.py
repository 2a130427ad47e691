"""Parts of ranks become one trace, which Perfetto's own classes read back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfetto_reader import ReadTrace, trace_pb
from phalanx.core.step_ranges import StepRange
from phalanx.observe.trace_part import (
    PART_SCHEMA,
    TracePartError,
    TracePartHeader,
    TracePartWriter,
    list_trace_parts,
    trace_part_path,
)
from phalanx.observe.trace_rows import (
    ActionSpan,
    ClockOffset,
    CollectiveSpan,
    MemorySample,
    OperatorSpan,
    PhaseSpan,
    StepSpan,
    TracedGroup,
    TraceRow,
)
from phalanx.report.trace.merge import TraceFacts, find_parts_of_steps, merge_trace_parts
from phalanx.report.trace.proto_message import ProtoMessage
from phalanx.report.trace.spans import assign_lanes
from phalanx.report.trace.words import list_trace_lines

STEPS = StepRange(7, 8)
BASE_NS = 5_000_000_000_000_000


def write_part(
    run_dir: Path,
    rank: int,
    rows: list[list[TraceRow]],
    *,
    clock: str = "one",
    attempt: int = 0,
    is_complete: bool = True,
    steps: StepRange = STEPS,
    world_size: int = 2,
) -> Path:
    header = TracePartHeader(
        PART_SCHEMA, rank, world_size, attempt, *steps, False, "cpu", "host", 1, clock, "one", ""
    )
    path = trace_part_path(run_dir, rank, attempt, steps)
    writer = TracePartWriter(path, header)
    for each in rows:
        writer.write_rows(each)
    writer.close(is_complete=is_complete)
    assert writer.refusal is None
    return path


def collective(
    sequence: int,
    posted_ns: int,
    wait_ns: int,
    end_ns: int,
    *,
    op: str = "all_reduce",
    peer: int = -1,
) -> CollectiveSpan:
    end_seen = "waited" if end_ns >= 0 else "open"
    return CollectiveSpan(
        7, 0, op, 0, sequence, "float32", 4096, 1, peer, 0 if peer >= 0 else -1, 1, "backward",
        "model.py:3", posted_ns, wait_ns, end_ns, end_seen,
    )  # fmt: skip


GROUP = [TracedGroup("key", "dp_replicate", "0-1")]


def rows_of(shift_ns: int = 0) -> list[list[TraceRow]]:
    """Two steps of a rank, 1000 ns each, of which the second has no phases."""
    zero = BASE_NS + shift_ns
    return [
        [StepSpan(7, zero, zero + 1000), StepSpan(8, zero + 1000, zero + 2000)],
        [
            PhaseSpan(7, 0, 1, "forward", "", "", zero + 10, zero + 200),
            PhaseSpan(7, 0, 1, "collective", "all_reduce gradients", "dp", zero + 300, zero + 400),
            PhaseSpan(7, 0, 1, "backward", "", "", zero + 200, zero + 500),
        ],
        list(GROUP),
        [
            collective(1, zero + 250, zero + 300, zero + 390),
            collective(2, zero + 260, -1, zero + 395),
            collective(3, zero + 500, -1, -1),
        ],
        [MemorySample(zero, 10, -1), MemorySample(zero + 900, 20, 7)],
    ]


def merge(run_dir: Path, steps: StepRange = STEPS) -> tuple[ReadTrace, dict[str, object]]:
    data = bytearray()
    facts = merge_trace_parts(find_parts_of_steps(run_dir, steps), steps, data.extend)
    return ReadTrace(bytes(data)), dict(facts.to_json())


def test_a_trace_has_phases_collectives_and_memory_of_each_rank(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_part(tmp_path, rank, rows_of(rank))
    trace, facts = merge(tmp_path)
    for rank in (0, 1):
        phases = {each.name: each for each in trace.slices(rank, "phases")}
        assert list(phases) == ["step 7", "forward", "backward", "collective", "step 8"]
        assert phases["forward"].start_ns == BASE_NS + rank + 10
        assert phases["collective"].parent is phases["backward"]
        assert phases["backward"].parent is phases["step 7"]
        assert phases["backward"].self_ns == 200
        assert phases["collective"].args == {
            "step": 7, "microbatch": 0, "of": "all_reduce gradients", "axis": "dp",
        }  # fmt: skip
        (microbatch,) = trace.slices(rank, "microbatches")
        assert (microbatch.name, microbatch.ns) == ("microbatch 0", 490)
        found = {
            each.args["sequence"]: each
            for each in trace.slices(rank, "collectives of dp_replicate")
            if each.name == "all_reduce"
        }
        assert found[1].ns == 140
        assert [child.name for child in found[1].children] == ["wait"]
        assert found[1].children[0].ns == 90
        assert found[2].track is not found[1].track, "they overlap"
        assert found[3].end_ns == BASE_NS + rank + 2000, "it was not seen to end"
        assert found[3].args["end"] == "open"
        assert found[1].args | {"end": ""} == {
            "group": "dp_replicate", "ranks": "0-1", "sequence": 1, "bytes": 4096,
            "type": "float32", "tensors": 1, "step": 7, "end": "", "microbatch": 0,
            "posted in": "backward", "line": "model.py:3",
        }  # fmt: skip
        (resident,) = trace.of_rank(rank, "resident memory")
        assert resident.is_bytes
        assert [value for _, value in resident.values] == [10, 20]
        (allocated,) = trace.of_rank(rank, "memory of the device")
        assert [value for _, value in allocated.values] == [7]
    assert facts["num_collectives"] == 6
    assert facts["clock_error_s"] == 0
    assert trace.about()["missing_ranks"] == "[]"


def test_a_part_of_the_steps_can_be_shown(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_part(tmp_path, rank, rows_of())
    trace, facts = merge(tmp_path, StepRange(8, 8))
    assert [each.name for each in trace.slices(0, "phases")] == ["step 8"]
    assert (facts["num_collectives"], facts["unfinished_ranks"]) == (0, [])


def test_clocks_of_machines_become_one_between_two_exchanges(tmp_path: Path) -> None:
    write_part(tmp_path, 0, rows_of())
    far = 3_000_000
    # It runs slow: 100 ns in 2000.
    offsets: list[TraceRow] = [
        ClockOffset(BASE_NS + far, -far, 40),
        ClockOffset(BASE_NS + far + 2000, -far + 100, 30),
    ]
    write_part(tmp_path, 1, [*rows_of(far), offsets], clock="other")
    trace, facts = merge(tmp_path)
    start_ns = {each.name: each.start_ns - BASE_NS for each in trace.slices(1, "phases")}
    assert start_ns == {
        "step 7": 0, "forward": 10, "backward": 210, "collective": 315, "step 8": 1050,
    }  # fmt: skip
    assert facts["clock_error_s"] == pytest.approx(40e-9)
    assert (facts["num_clocks"], facts["unaligned_ranks"]) == (2, [])


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    write_part(tmp_path, 0, rows_of(), world_size=5)
    step, *others = rows_of()
    write_part(tmp_path, 1, [step[:1], *others], world_size=5, is_complete=False, clock="other")
    trace_part_path(tmp_path, 2, 0, STEPS).write_text("no part\n")
    trace_part_path(tmp_path, 3, 0, STEPS).mkdir()
    trace, facts = merge(tmp_path)
    assert facts["ranks"] == [0, 1]
    assert facts["missing_ranks"] == [2, 3, 4]
    assert facts["unfinished_ranks"] == [1]
    assert facts["unaligned_ranks"] == [1]
    lines = list_trace_lines(tmp_path, 1, TraceFacts.from_json(facts))
    assert "clock   2 clocks; how far these are apart is not known" in lines
    unreadable = facts["unreadable"]
    assert isinstance(unreadable, list)
    assert [each["file"].partition("-attempt")[0] for each in unreadable] == [
        "rank-0002", "rank-0003",
    ]  # fmt: skip
    names = {track.process for track in trace.tracks.values()}
    assert "rank 4: it left no part of the trace" in names
    parts = [part for part in list_trace_parts(tmp_path) if part.rank == 2]
    with pytest.raises(TracePartError, match="no header"):
        merge_trace_parts(parts, STEPS, bytearray().extend)


def test_a_part_without_anything_of_the_steps_does_not_move_the_beginning(tmp_path: Path) -> None:
    """The viewer would show the time since the machine was started."""
    write_part(tmp_path, 0, rows_of(), world_size=3)
    write_part(tmp_path, 1, [], world_size=3, is_complete=False)
    trace, facts = merge(tmp_path)
    assert facts["unfinished_ranks"] == [1]
    times = [each.start_ns for track in trace.tracks.values() for each in track.instants]
    assert times
    assert min(times) == BASE_NS


def test_an_arrow_leads_from_a_send_to_where_its_receive_ended(tmp_path: Path) -> None:
    rows = rows_of()[:1]
    # The receive was posted first.
    sent = [collective(1, BASE_NS + 100, -1, BASE_NS + 300, op="send", peer=1)]
    got = [collective(1, BASE_NS + 50, BASE_NS + 60, BASE_NS + 200, op="recv", peer=0)]
    lost = [collective(2, BASE_NS + 210, -1, BASE_NS + 220, op="send", peer=1)]
    write_part(tmp_path, 0, [*rows, list(GROUP), [*sent, *lost]])
    write_part(tmp_path, 1, [*rows, list(GROUP), list(got)])
    trace, facts = merge(tmp_path)
    (start,) = [each for each in trace.slices(0, "collectives") if each.flows]
    (end,) = [each for each in trace.slices(1, "collectives") if each.flow_ends]
    assert (start.name, start.args["sequence"]) == ("send", 1)
    assert start.flows == end.flow_ends
    assert start.start_ns <= end.start_ns <= BASE_NS + 200
    assert end.parent is not None
    assert facts["num_arrows"] == 1


def test_the_newest_attempt_counts(tmp_path: Path) -> None:
    write_part(tmp_path, 0, rows_of())
    write_part(tmp_path, 0, rows_of(5), attempt=2, steps=StepRange(1, 9))
    assert [part.attempt for part in find_parts_of_steps(tmp_path, STEPS)] == [2]
    assert find_parts_of_steps(tmp_path, StepRange(8, 10)) == []


def test_operators_and_actions_have_tracks_of_their_own(tmp_path: Path) -> None:
    operators: list[TraceRow] = [
        OperatorSpan("operators of thread 1", "outer", BASE_NS + 10, BASE_NS + 50),
        # The profiler's clock may be off by nanoseconds.
        OperatorSpan("operators of thread 1", "inner", BASE_NS + 20, BASE_NS + 51),
        OperatorSpan("operators of thread 1", "not in these steps", BASE_NS - 20, BASE_NS - 10),
    ]
    actions: list[TraceRow] = [ActionSpan(7, "0F1", BASE_NS + 5, BASE_NS + 60)]
    write_part(tmp_path, 0, [*rows_of(), operators, actions])
    trace, facts = merge(tmp_path)
    outer, inner = trace.slices(0, "operators of thread 1")
    assert inner.parent is outer
    assert inner.end_ns == outer.end_ns
    assert [each.name for each in trace.slices(0, "pipeline actions")] == ["0F1"]
    assert not trace.of_rank(0, "microbatches")
    assert facts["num_operators"] == 2


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=30))
def test_lanes_do_not_overlap_and_are_as_few_as_can_be(pairs: list[tuple[int, int]]) -> None:
    spans = [(start, start + length) for start, length in pairs]
    lanes = assign_lanes(spans)
    for index, (start, end) in enumerate(spans):
        for other, (other_start, other_end) in enumerate(spans[:index]):
            if lanes[index] == lanes[other]:
                assert end <= other_start or other_end <= start
    busiest = 0
    for moment in range(41):
        # One without length takes a lane, too, where another is under way.
        under_way = [start <= moment < max(end, start + 1) for start, end in spans]
        busiest = max(busiest, sum(under_way))
    assert len(set(lanes)) <= busiest


@given(st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1), st.text(max_size=300))
def test_messages_are_those_of_protocol_buffers(unsigned: int, signed: int, text: str) -> None:
    """Whatever the numbers and the text: the reference are the classes that protoc generates."""
    event = ProtoMessage().add_int(11, unsigned).add_int(30, signed).add_fixed64(47, unsigned)
    message = ProtoMessage().add_int(8, unsigned).add_message(11, event.add_text(23, text))
    packet = trace_pb.TracePacket()
    packet.ParseFromString(bytes(message.data))
    assert packet.timestamp == packet.track_event.track_uuid == unsigned
    assert packet.track_event.counter_value == signed
    assert list(packet.track_event.flow_ids) == [unsigned]
    assert packet.track_event.name == text
