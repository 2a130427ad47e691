"""The reader of growing event files: whole lines only, new files as they come."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import resource
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import BinaryIO, NoReturn

import pytest

from phalanx.checkpoint.ownership.fence import RunOwnershipWatch
from phalanx.core.files import MAX_LINE_BYTES, open_regular_file
from phalanx.observe import event_file
from phalanx.observe import tail as reading
from phalanx.observe.bus import Bus, build_event_file_path
from phalanx.observe.console import PlainConsole, RunProgress
from phalanx.observe.events import (
    EVENT_CLASS_OF_KIND,
    EVENTS_REMOVED,
    CheckpointFailed,
    Envelope,
    EvalFinished,
    Event,
    LoaderWorkerReplaced,
    Note,
    RestartScheduled,
    RunFinished,
    SinkDropped,
    StepSkipped,
)
from phalanx.observe.screen import QuietStream
from phalanx.observe.tail import (
    EventTail,
    follow_shown_events,
    parse_valid_event_line,
    read_recorded_events,
)
from phalanx.report.reduce import collect_run_facts
from phalanx.run.supervised import (
    build_refused_event_printer,
    open_supervisor_event_bus,
    take_refused_event,
)


def line(event: Event, *, rank: int = 0, attempt: int = 0, at: float = 1.0) -> bytes:
    return Envelope(event, rank, attempt, at).to_line().encode() + b"\n"


def append(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.write(data)


def codes(found: list[Envelope]) -> list[str]:
    return [envelope.event.code for envelope in found if isinstance(envelope.event, Note)]


def test_nothing_before_the_directory_exists(tmp_path: Path) -> None:
    assert EventTail(tmp_path / "absent").read_new_events() == []


def test_what_is_there_is_read_attempt_by_attempt_and_what_follows_behind_it(
    tmp_path: Path,
) -> None:
    """The order of the supervisor's file and of the ranks' is kept where one follows the other."""
    supervisor = build_event_file_path(tmp_path, -1, 0)
    for attempt in (0, 1):
        told = [Note(f"begin {attempt}")]
        told += [RestartScheduled(1, 3, 0)] if attempt == 0 else []
        append(supervisor, b"".join(line(event, rank=-1, attempt=attempt) for event in told))
        for rank in (0, 1):
            path = build_event_file_path(tmp_path, rank, attempt)
            append(path, line(Note(f"rank {rank} of {attempt}"), rank=rank, attempt=attempt))
    append(path, b'{"event":"note"')
    tail = EventTail(tmp_path, all_ranks=True)
    past = list(tail.iterate_past_events())
    assert [
        envelope.event.code if isinstance(envelope.event, Note) else "restart" for envelope in past
    ] == [
        "begin 0",
        "rank 0 of 0",
        "rank 1 of 0",
        "restart",
        "begin 1",
        "rank 0 of 1",
        "rank 1 of 1",
    ]
    assert tail.read_new_events() == [], "the last line is torn"
    append(path, b"}\n" + line(Note("new"), rank=1, attempt=1))
    assert codes(tail.read_new_events()) == ["new"]
    assert tail.num_unreadable == 1


def test_of_some_kinds_of_events_the_others_are_left_out(tmp_path: Path) -> None:
    for rank in (0, 1):
        path = build_event_file_path(tmp_path, rank, 0)
        append(path, line(Note(f"n{rank}"), rank=rank) + line(RestartScheduled(1, 3, 0), rank=rank))
    tail = EventTail(tmp_path, all_ranks=True, kinds=(RestartScheduled,))
    found = tail.read_new_events()
    assert [(each.rank, type(each.event)) for each in found] == [
        (0, RestartScheduled),
        (1, RestartScheduled),
    ]
    append(path, line(Note("more"), rank=1) + line(RestartScheduled(2, 3, 0), rank=1))
    assert [each.event for each in tail.read_new_events()] == [RestartScheduled(2, 3, 0)]
    assert tail.num_unreadable == 0


def test_a_loader_worker_of_any_rank_is_shown_and_of_others_than_rank_0_nothing_else(
    tmp_path: Path,
) -> None:
    tail = follow_shown_events(tmp_path)
    for rank in (0, 2):
        path = build_event_file_path(tmp_path, rank, 0)
        replaced = LoaderWorkerReplaced(7, f"worker 1 of rank {rank} killed by SIGKILL")
        append(path, line(Note(f"of {rank}"), rank=rank) + line(replaced, rank=rank))
    shown = tail.read_new_events()
    assert codes([each for each in shown if isinstance(each.event, Note)]) == ["of 0"]
    stream = io.StringIO()
    console = PlainConsole(QuietStream(stream), RunProgress(9), 1)
    for envelope in shown:
        console.write(envelope)
    assert stream.getvalue().splitlines() == [
        f"a loader worker was replaced at step 7: worker 1 of rank {rank} killed by SIGKILL"
        for rank in (0, 2)
    ]
    assert tail.num_unreadable == 0


def test_a_torn_line_waits_for_its_end(tmp_path: Path) -> None:
    path, whole = build_event_file_path(tmp_path, 0, 0), line(Note("second"))
    append(path, line(Note("first")) + whole[:20])
    tail = EventTail(tmp_path)
    assert codes(tail.read_new_events()) == ["first"]
    assert tail.read_new_events() == []
    append(path, whole[20:])
    assert codes(tail.read_new_events()) == ["second"]
    assert tail.num_unreadable == 0


def test_new_files_appear_and_lines_come_in_order_of_time(tmp_path: Path) -> None:
    tail = EventTail(tmp_path)
    append(build_event_file_path(tmp_path, 0, 0), line(Note("b"), at=2.0))
    append(build_event_file_path(tmp_path, -1, 0), line(Note("a"), rank=-1, at=1.0))
    assert codes(tail.read_new_events()) == ["a", "b"]
    append(build_event_file_path(tmp_path, 0, 1), line(Note("c"), attempt=1, at=3.0))
    assert codes(tail.read_new_events()) == ["c"]


def test_only_rank_0_and_the_supervisor_unless_asked(tmp_path: Path) -> None:
    for rank in (-1, 0, 1):
        append(build_event_file_path(tmp_path, rank, 0), line(Note(f"rank {rank}"), rank=rank))
    assert codes(EventTail(tmp_path).read_new_events()) == ["rank 0", "rank -1"]
    assert set(codes(EventTail(tmp_path, all_ranks=True).read_new_events())) == {
        "rank -1",
        "rank 0",
        "rank 1",
    }


def test_a_file_that_cannot_be_looked_at_hides_no_other(tmp_path: Path) -> None:
    append(tmp_path / "events" / "rank-0001-attempt-00.jsonl", line(Note("read"), rank=1))
    (tmp_path / "events" / "supervisor.jsonl").symlink_to("supervisor.jsonl")
    (tmp_path / "events" / "rank-0000-attempt-00.jsonl").symlink_to("nowhere")
    assert codes(EventTail(tmp_path, all_ranks=True).read_new_events()) == ["read"]


def test_earlier_attempts_are_left_out(tmp_path: Path) -> None:
    for attempt in (0, 1):
        append(
            build_event_file_path(tmp_path, 0, attempt),
            line(Note(f"rank {attempt}"), attempt=attempt),
        )
        append(
            build_event_file_path(tmp_path, -1, 0),
            line(Note(f"supervisor {attempt}"), rank=-1, attempt=attempt),
        )
    assert set(codes(EventTail(tmp_path, attempt_from=1).read_new_events())) == {
        "rank 1",
        "supervisor 1",
    }


def test_follows_what_a_bus_writes(tmp_path: Path) -> None:
    bus, tail = Bus(rank=0, run_dir=tmp_path), EventTail(tmp_path)
    bus.emit(StepSkipped(3, "nonfinite_gradients", math.nan, 96, 32))
    (found,) = tail.read_new_events()
    assert isinstance(found.event, StepSkipped)
    assert math.isnan(found.event.grad_norm)
    bus.close()


def test_unreadable_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    append(
        build_event_file_path(tmp_path, 0, 0),
        b'{"event":"from_the_future"}\n\xff\xfe\n\n' + line(Note("good")) + b"[1]\n",
    )
    tail = EventTail(tmp_path)
    assert codes(tail.read_new_events()) == ["good"]
    assert tail.num_unreadable == 3


WRONG = {
    "step": ["5", None, [], True, 10**400, 10**19, 1e19],
    "path": [1, None],
    "time_unix_s": ["now", -1, None, 1e300],
    "rank": ["0", 0.5],
    "attempt": [None],
}


def overlong() -> bytes:
    return line(Note("overlong", {"text": "x" * MAX_LINE_BYTES}))


def test_an_overlong_line_hides_nothing_behind_it(tmp_path: Path) -> None:
    """From none of the three readers, and it is counted."""
    path = build_event_file_path(tmp_path, 0, 0)
    before, after = EvalFinished(1, 1.5, 9, 0.1), EvalFinished(2, 1.5, 9, 0.1)
    append(path, line(before) + overlong() + line(after) + line(RunFinished("finished", 0, 2, 1.0)))
    tail = EventTail(tmp_path)
    assert [e.event.kind() for e in tail.read_new_events()] == [
        "eval_finished",
        "eval_finished",
        "run_finished",
    ]
    assert (tail.read_new_events(), tail.num_unreadable) == ([], 1)
    assert [e.event for e in read_recorded_events(tmp_path, EvalFinished)] == [before, after]
    facts = collect_run_facts(tmp_path)
    assert (facts.status, facts.num_unreadable) == ("finished", 1)


def test_an_overlong_line_that_grows_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = build_event_file_path(tmp_path, 0, 0), overlong()
    append(path, whole[: MAX_LINE_BYTES + 10])
    tail = EventTail(tmp_path)
    opened: list[Path] = []

    def open_counted(path: Path) -> BinaryIO:
        opened.append(path)
        return open_regular_file(path)

    monkeypatch.setattr(reading, "open_regular_file", open_counted)
    assert tail.read_new_events() == []
    for _ in range(3):
        assert tail.read_new_events() == []
    assert len(opened) == 1
    append(path, whole[MAX_LINE_BYTES + 10 : -5])
    assert tail.read_new_events() == []
    append(path, whole[-5:] + line(Note("behind"))[:9])
    assert tail.read_new_events() == []
    append(path, line(Note("behind"))[9:])
    assert codes(tail.read_new_events()) == ["behind"]
    assert tail.num_unreadable == 1


def test_what_a_disk_refuses_is_shown_once(tmp_path: Path) -> None:
    """At once, and not again when it is in the file."""
    console = PlainConsole(QuietStream(io.StringIO()), RunProgress(9), 1)
    tail = EventTail(tmp_path)
    bus = open_supervisor_event_bus(
        tmp_path, 0, build_refused_event_printer(console, tail), RunOwnershipWatch(tmp_path, None)
    )
    bus.emit(Note("first"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # the file has more already
    try:
        bus.emit(RestartScheduled(1, 3, 400))
        num_unwritten = bus.num_unwritten
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert num_unwritten > 0
    assert console._pace.num_restarts == 1
    bus.emit(Note("last"))
    assert bus.num_unwritten == 0
    bus.close()
    for envelope in tail.read_new_events():
        console.write(envelope)
    assert console._pace.num_restarts == 1
    assert codes(EventTail(tmp_path).read_new_events()) == ["first", "events_unwritten", "last"]


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """The event files, which have more already, take no byte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_process_that_goes_on_writes_what_the_disk_refused_in_the_attempt_before(
    tmp_path: Path,
) -> None:
    """In the file of that attempt, before the first line of the next one; over two attempts."""
    first = Bus(rank=0, run_dir=tmp_path)
    first.emit(Note("first"))
    with full_disk():
        first.emit(Note("refused"))
        first.close(0.0, goes_on=True)
        second = Bus(rank=0, attempt=1, run_dir=tmp_path, earlier=first.take_unwritten())
    with full_disk():
        second.emit(Note("x" * 20))
        second.close(0.0, goes_on=True)
    third = Bus(rank=0, attempt=2, run_dir=tmp_path, earlier=second.take_unwritten())
    third.emit(Note("last"))
    third.close()
    told = EventTail(tmp_path).read_new_events()
    assert [(envelope.attempt, envelope.seq) for envelope in told] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (2, 0),
    ], "each with the note that the disk refuses, and none that anything is lost"
    assert not [envelope for envelope in told if isinstance(envelope.event, SinkDropped)]
    assert "refused" in codes(told)


def test_lines_of_an_attempt_are_written_where_only_the_file_of_the_one_before_is_refused(
    tmp_path: Path,
) -> None:
    """A file may be at its limit while the next one is not."""
    first = Bus(rank=0, run_dir=tmp_path)
    first.emit(Note("first", {"text": "x" * 3000}))
    unwritten: list[str] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        first.emit(Note("refused"))
        first.close(0.0, goes_on=True)
        second = Bus(
            rank=0,
            attempt=1,
            run_dir=tmp_path,
            earlier=first.take_unwritten(),
            on_unwritten=lambda event: unwritten.append(event.to_line()),
        )
        second.emit(Note("second"))
        second.close(0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told = [event for event in EventTail(tmp_path).read_new_events() if event.attempt == 1]
    assert codes(told[:1]) == ["second"]
    # That of the first attempt, with the note of it, is told as lost where it can be written.
    (lost,) = [envelope.event for envelope in told[1:]]
    assert isinstance(lost, SinkDropped)
    assert lost.num_dropped == 2
    assert not unwritten


def test_lines_that_the_disk_takes_at_the_end_are_not_called_lost(tmp_path: Path) -> None:
    bus = Bus(rank=0, run_dir=tmp_path)
    bus.emit(Note("first"))
    with full_disk():
        bus.emit(Note("refused"))
    bus.close()
    assert codes(EventTail(tmp_path).read_new_events()) == ["first", "refused", "events_unwritten"]


def test_lost_events_are_told_to_whoever_lives_on_and_are_a_warning(tmp_path: Path) -> None:
    """A rank that ends while the disk is full cannot record it."""
    supervisor = Bus(rank=-1, run_dir=tmp_path)
    refused: list[str] = []
    rank = Bus(rank=0, run_dir=tmp_path, on_unwritten=lambda event: refused.append(event.to_line()))
    rank.emit(Note("first"))
    with full_disk():
        rank.emit(Note("refused"))
        rank.close(0.0, goes_on=True)
        # No attempt follows.
        rank.close_file()
    shown: list[Envelope | None] = []
    for each in refused:
        take_refused_event(each, supervisor, shown.append)
    supervisor.close()
    assert [type(envelope.event) for envelope in shown if envelope] == [Note, Note]
    facts = collect_run_facts(tmp_path)
    (warning,) = [text for text in facts.warnings if text not in facts.problems]
    assert warning.startswith("lost 2 events: the event file of rank 0 did not take them")


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG.items() for value in values]
)
def test_values_of_the_wrong_type_are_no_event(key: str, value: object) -> None:
    good = json.loads(line(CheckpointFailed(1, "p", "full")))
    assert parse_valid_event_line(json.dumps(good).encode()) is not None
    assert parse_valid_event_line(json.dumps(good | {key: value}).encode()) is None


def test_deeply_nested_json_is_no_event() -> None:
    assert parse_valid_event_line(b'{"event":"note","facts":' + b"[" * 100_000) is None


def test_an_event_survives_the_trip() -> None:
    sent = Envelope(RestartScheduled(1, 3, 400), -1, 1, 12.5)
    assert parse_valid_event_line(sent.to_line().encode()) == sent


def test_events_of_one_kind_are_found_again(tmp_path: Path) -> None:
    """Those of rank 0, in the order of the attempts, whatever else lies there."""
    for attempt, step in ((0, 1), (1, 2), (10, 3)):
        append(
            build_event_file_path(tmp_path, 0, attempt),
            line(Note("eval_finished")) + line(EvalFinished(step, 1.5, 9, 0.1)),
        )
    append(
        build_event_file_path(tmp_path, 0, 0),
        b'{"event":"eval_finished","step":"x"}\n' + line(EvalFinished(9, 1.5, 9, 0.1))[:30],
    )
    append(build_event_file_path(tmp_path, 1, 0), line(EvalFinished(7, 1.5, 9, 0.1), rank=1))
    append(tmp_path / "events" / "notes.txt", line(EvalFinished(8, 1.5, 9, 0.1)))
    found = list(read_recorded_events(tmp_path, EvalFinished))
    assert [
        envelope.event.step for envelope in found if isinstance(envelope.event, EvalFinished)
    ] == [1, 2, 3]
    assert list(read_recorded_events(tmp_path / "absent", EvalFinished)) == []


def test_every_type_of_field_can_be_read() -> None:
    """A field of a type that reading does not know would end whoever reads the file."""
    unknown = {item.type for kind in EVENT_CLASS_OF_KIND.values() for item in fields(kind)} - set(
        reading._VALIDATOR_OF_ANNOTATION
    )
    assert not unknown


@pytest.mark.parametrize("is_moved", [False, True], ids=["removed", "moved"])
def test_an_events_folder_that_is_removed_is_made_anew_and_the_supervisor_says_so(
    is_moved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each file the new events are longer, and shorter, than the old ones."""
    monkeypatch.setattr(event_file, "PLACE_CHECK_INTERVAL_S", 0.0)
    supervisor, rank = Bus(rank=-1, run_dir=tmp_path), Bus(rank=0, run_dir=tmp_path)
    tail = EventTail(tmp_path)
    rank.emit(Note("before", {"why": "x" * 1000}))
    supervisor.emit(Note("before"))
    assert codes(tail.read_new_events()) == ["before", "before"]
    if is_moved:
        (tmp_path / "events").rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(tmp_path / "events")
    rank.emit(Note("after"))
    supervisor.emit(Note("end"))
    read = tail.read_new_events()
    assert codes(read) == ["after", EVENTS_REMOVED, "end"]
    # A reader of the new files alone knows one clock of both processes.
    (name,) = {each.clock and each.clock.name for each in EventTail(tmp_path).read_new_events()}
    assert name
    supervisor.keep_file_in_place(now=True)
    assert tail.read_new_events() == []
    supervisor.close()
    rank.close()


def test_a_new_file_that_cannot_be_opened_at_once_is_read_from_its_beginning_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tail = build_event_file_path(tmp_path, 0, 0), EventTail(tmp_path)
    append(path, line(Note("one", {"why": "x" * 1000})))
    assert codes(tail.read_new_events()) == ["one"]
    path.rename(tmp_path / "elsewhere")
    append(path, line(Note("two")))
    with monkeypatch.context() as patch:
        patch.setattr(reading, "open_regular_file", refuse)
        assert tail.read_new_events() == []
    assert codes(tail.read_new_events()) == ["two"]


def refuse(path: Path) -> NoReturn:
    raise OSError(errno.EMFILE, "too many open files")


def test_a_file_whose_number_changes_is_not_read_twice(tmp_path: Path) -> None:
    """As on file systems that number what they have in memory."""
    path, tail = build_event_file_path(tmp_path, 0, 0), EventTail(tmp_path)
    append(path, line(Note("one")))
    assert codes(tail.read_new_events()) == ["one"]
    shutil.copy(path, tmp_path / "copy")
    (tmp_path / "copy").rename(path)
    append(path, line(Note("two")))
    assert codes(tail.read_new_events()) == ["two"]


def test_a_run_that_is_removed_is_not_made_anew(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    bus = Bus(rank=-1, run_dir=run_dir)
    shutil.rmtree(run_dir)
    bus.keep_file_in_place(now=True)
    bus.emit(Note("end"))
    bus.close()
    assert not run_dir.exists()
