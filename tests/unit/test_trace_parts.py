"""The part of a trace that a rank writes: whole after a crash, bounded, and read with suspicion."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from phalanx.core.errors import JobError
from phalanx.core.step_ranges import StepRange, merge_step_ranges, parse_step_range
from phalanx.job.load import load_job
from phalanx.observe import trace_part
from phalanx.observe.trace_part import (
    PART_SCHEMA,
    TracePartError,
    TracePartHeader,
    TracePartWriter,
    is_trace_part_complete,
    list_trace_parts,
    read_trace_part,
    trace_part_path,
)
from phalanx.observe.trace_request import (
    TraceAnswer,
    TraceRequest,
    TraceRequestInbox,
    read_trace_answer,
    withdraw_trace_request,
    write_trace_answer,
    write_trace_request,
)
from phalanx.observe.trace_rows import MemorySample, PhaseSpan

STEPS = StepRange(3, 4)
HEADER = TracePartHeader(
    PART_SCHEMA, 1, 2, 0, 3, 4, False, "cpu", "a host", 7, "one", "one", "pp 1"
)
PHASES = [
    PhaseSpan(3, -1, 1, "data", "", "", 10, 20),
    PhaseSpan(3, 0, 1, "forward", "words, with ünicode", "", 20, 2**62),
]


def write(run_dir: Path, *, is_complete: bool = True) -> Path:
    path = trace_part_path(run_dir, 1, 0, STEPS)
    writer = TracePartWriter(path, HEADER)
    writer.write_rows(PHASES)
    writer.write_rows([MemorySample(10, 5, -1)])
    writer.close(is_complete=is_complete)
    return path


def test_a_part_says_what_was_written(tmp_path: Path) -> None:
    path = write(tmp_path)
    part = read_trace_part(path)
    assert part.header == HEADER
    assert part.of_kind("phase") == PHASES
    assert part.of_kind("memory") == [MemorySample(10, 5, -1)]
    assert (part.is_complete, part.num_dropped, part.num_unreadable) == (True, 0, 0)
    assert is_trace_part_complete(path)
    (found,) = list_trace_parts(tmp_path)
    assert (found.rank, found.attempt, found.steps, found.path) == (1, 0, STEPS, path)


def test_of_a_rank_that_died_the_lines_before_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, is_complete=False)
    assert not is_trace_part_complete(path)
    path.write_bytes(path.read_bytes()[:-4])
    part = read_trace_part(path)
    assert part.of_kind("phase") == PHASES
    assert not part.of_kind("memory")
    assert (part.is_complete, part.num_unreadable) == (False, 1)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{",
        '{"kind": "unknown", "texts": [], "rows": []}',
        '{"kind": "memory", "texts": [], "rows": [[1, 2]]}',
        '{"kind": "memory", "texts": [], "rows": [[1, 2, true]]}',
        '{"kind": "memory", "texts": [], "rows": [[1, 2, 1e3]]}',
        '{"kind": "memory", "texts": [], "rows": [[1, 2, 99999999999999999999]]}',
        '{"kind": "memory", "texts": [], "rows": 5}',
        '{"kind": "phase", "texts": ["a"], "rows": [[1, 0, 1, 1, 0, 0, 1, 2]]}',
        '{"kind": "phase", "texts": ["a"], "rows": [[1, 0, 1, -1, 0, 0, 1, 2]]}',
        '{"kind": "phase", "texts": [1], "rows": [[1, 0, 1, 0, 0, 0, 1, 2]]}',
        '{"kind": "end"}',
        "[" * 100_000,
    ],
)
def test_a_line_that_is_no_row_is_left_out(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, is_complete=False)
    with path.open("a") as file:
        file.write(line + "\n")
    part = read_trace_part(path)
    assert part.num_unreadable == 1
    assert part.of_kind("phase") == PHASES
    assert part.of_kind("memory") == [MemorySample(10, 5, -1)]
    assert not part.is_complete


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"schema": "phalanx.trace-part/9"}, "trace-part/9"),
        ({"rank": "one"}, "no header"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"world_size": 10**9}, "1000000000"),
        ({"more": 1}, "no header"),
    ],
)
def test_another_header_is_refused(tmp_path: Path, change: dict[str, object], match: str) -> None:
    path = write(tmp_path)
    head, *lines = path.read_text().splitlines(keepends=True)
    path.write_text(json.dumps(json.loads(head) | change) + "\n" + "".join(lines))
    with pytest.raises(TracePartError, match=match):
        read_trace_part(path)


def test_a_part_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_part, "MAX_ROWS_PER_PART", 3)
    part = read_trace_part(write(tmp_path))
    assert (len(part.of_kind("phase")), len(part.of_kind("memory"))) == (2, 1)
    path = trace_part_path(tmp_path, 1, 0, STEPS)
    writer = TracePartWriter(path, HEADER)
    writer.write_rows(PHASES * 2)
    writer.write_rows(PHASES)
    writer.close(is_complete=True)
    part = read_trace_part(path)
    assert (len(part.of_kind("phase")), part.num_dropped) == (3, 3)


def test_a_disk_that_refuses_a_part_ends_it_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "traces").write_text("in the way")
    path = trace_part_path(tmp_path, 1, 0, STEPS)
    writer = TracePartWriter(path, HEADER)
    writer.write_rows(PHASES)
    writer.close(is_complete=True)
    assert writer.refusal is not None
    (tmp_path / "traces").unlink()

    def refuse(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = TracePartWriter(path, HEADER)
    monkeypatch.setattr(trace_part.os, "write", refuse)
    writer.write_rows(PHASES)
    monkeypatch.undo()
    writer.close(is_complete=True)
    assert writer.refusal is not None
    assert writer.refusal.errno == errno.ENOSPC
    assert not read_trace_part(path).is_complete, "a gap is no complete part"


def test_ranges_of_steps() -> None:
    assert parse_step_range("100:103") == StepRange(100, 103)
    assert parse_step_range(7) == StepRange(7, 7)
    for text in ("", "a", "1:2:3", "-1", "1:", "٣", "1" * 13, "3.0"):
        with pytest.raises(ValueError, match="no range of steps"):
            parse_step_range(text)
    with pytest.raises(ValueError, match="ends before it begins"):
        parse_step_range("5:4")
    with pytest.raises(ValueError, match="before step 1"):
        parse_step_range("0:4")
    ranges = [StepRange(9, 9), StepRange(1, 3), StepRange(2, 2), StepRange(4, 5)]
    assert merge_step_ranges(ranges) == [StepRange(1, 5), StepRange(9, 9)]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ('observe.trace_steps=["0:2"]', "trace_steps[0]: '0:2' begins before step 1"),
        ('observe.trace_steps=[3, "a"]', "trace_steps[1]: 'a' is no range of steps"),
        ('observe.trace_steps=["3:2"]', "trace_steps[0]: '3:2' ends before it begins"),
        (
            'observe.trace_steps=["1:60", "41:101"]',
            "trace_steps: 101 steps, and it takes at most 100",
        ),
        ('observe.profile_steps=["1:11"]', "profile_steps: 11 steps, and it takes at most 10"),
        ("observe.trace_steps=[501]", "trace_steps names step 501, and train.steps is 500"),
        ("observe.profile_steps=[501]", "profile_steps names step 501, and train.steps is 500"),
    ],
)
def test_a_job_whose_steps_cannot_be_traced_is_refused(override: str, said: str) -> None:
    with pytest.raises(JobError) as refused:
        load_job(None, ["train.steps=500", override])
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("first_step", [0, 1, 10**12])
@pytest.mark.parametrize("num_steps", [1, 100])
@pytest.mark.parametrize("has_operators", [False, True])
def test_a_request_travels_as_one_number(
    first_step: int, num_steps: int, has_operators: bool
) -> None:
    request = TraceRequest("", first_step, num_steps, has_operators)
    assert request.is_valid
    assert TraceRequest.unpack(request.pack()) == request


def test_a_request_is_taken_once_and_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.observe.trace_request.LOOK_INTERVAL_S", 0.0)
    inbox = TraceRequestInbox(tmp_path)
    assert inbox.take_request() is None
    request = TraceRequest("abc", 5, 2, True)
    write_trace_request(tmp_path, request)
    assert inbox.take_request() == request
    assert inbox.take_request() is None
    assert not withdraw_trace_request(tmp_path, request), "it was taken"
    write_trace_answer(tmp_path, TraceAnswer("abc", "accepted", 4, 0, 5, 6))
    answer = read_trace_answer(tmp_path, "abc")
    assert answer is not None
    assert (answer.first_step, answer.last_step) == (5, 6)
    assert read_trace_answer(tmp_path, "another") is None
    write_trace_request(tmp_path, request)
    assert withdraw_trace_request(tmp_path, request)
    assert inbox.take_request() is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"id": "x", "first_step": 1, "num_steps": 101}',
        '{"id": "x", "first_step": -1, "num_steps": 1}',
        '{"id": "x", "first_step": 1, "num_steps": 1, "schema": "phalanx.trace-request/2"}',
        '{"id": "x", "first_step": true, "num_steps": 1}',
        "[" * 5000,
    ],
)
def test_what_is_no_request_is_removed_and_ignored(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.observe.trace_request.LOOK_INTERVAL_S", 0.0)
    (tmp_path / "traces").mkdir()
    path = tmp_path / "traces" / "request.json"
    path.write_text(text)
    assert TraceRequestInbox(tmp_path).take_request() is None
    assert not path.exists()
