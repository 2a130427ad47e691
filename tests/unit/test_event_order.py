"""Events in the order in which they happened, whatever the wall clocks of their machines showed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.core.clocks import build_monotonic_clock_id
from phalanx.observe import events
from phalanx.observe.bus import Bus, build_event_file_path
from phalanx.observe.events import (
    EVENT_CLASS_OF_KIND,
    Envelope,
    Event,
    MonotonicClockReading,
    StepFinished,
)
from phalanx.observe.order import sort_events
from phalanx.observe.tail import EventTail, _list_field_checks, read_recorded_events
from phalanx.report.reduce import collect_run_facts
from phalanx.report.summary import build_run_json

HOUR_S, DAY_S = 3600.0, 86400.0
BOOT_S = 5000.0


class Clocked:
    """Writes a run of two commands: 20 steps, a restart, 20 more; then a resume, 20 more.

    A second per event.

    From the event `stepped_at` on, every process's wall clock is off by `stepped_s`.
    """

    def __init__(
        self, run_dir: Path, stepped_s: float, stepped_at: int, *, is_old: bool = False
    ) -> None:
        self.dir, self._stepped_s, self._stepped_at, self._is_old = (
            run_dir,
            stepped_s,
            stepped_at,
            is_old,
        )
        self._num_told = 0

    def say(self, event: Event, attempt: int, rank: int = 0) -> None:
        self._num_told += 1
        now_s = BOOT_S + self._num_told
        wall_s = (
            1_700_000_000.0
            + now_s
            + (self._stepped_s if self._num_told >= self._stepped_at else 0.0)
        )
        seq, steady_s = (-1, math.nan) if self._is_old else (self._num_told, now_s)
        path = build_event_file_path(self.dir, rank, attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(Envelope(event, rank, attempt, wall_s, seq, steady_s).to_line() + "\n")

    def write(self) -> None:
        started = {
            "run": "r",
            "job_digest": "d",
            "world_size": 1,
            "total_steps": 60,
            "device": "cpu",
            "layout": {},
        }
        for attempt, (first, last) in enumerate(((1, 20), (21, 40), (41, 60))):
            if attempt != 1:
                self.say(events.Note("server_ready"), attempt, -1)
            self.say(events.RanksStarted([1], 0.1), attempt, -1)
            self.say(events.RunStarted(step=first - 1, startup_s=1.0, **started), attempt)
            for step in range(first, last + 1):
                self.say(
                    StepFinished(step, 2.0, 1, step, 0.1, 0.1, 1.0, 1.0, {"forward": 1.0}, 0.0, 1),
                    attempt,
                )
            self.say(events.CheckpointSaved(last, f"checkpoints/step-{last}", 1, 0.1), attempt)
            if attempt == 0:
                self.say(events.RankFailed(0, last, "data", "signal", "killed", 0.1), attempt, -1)
                self.say(events.RestartScheduled(1, 3, last), attempt, -1)
            else:
                status, code = ("preempted", 75) if attempt == 1 else ("finished", 0)
                wall_s = 50.0 if attempt == 1 else 25.0
                self.say(events.RunFinished(status, code, last, wall_s), attempt, -1)


@pytest.mark.parametrize("stepped_s", [-DAY_S, -HOUR_S, HOUR_S, DAY_S])
@pytest.mark.parametrize("stepped_at", [2, 10, 23, 26, 48, 60])
@pytest.mark.parametrize("is_old", [False, True])
def test_a_stepped_clock_changes_nothing_but_what_is_shown_of_it(
    tmp_path: Path, stepped_s: float, stepped_at: int, is_old: bool
) -> None:
    """The run whose clocks were right is the reference."""
    told, seen = [], []
    for name, step_s in (("right", 0.0), ("stepped", stepped_s)):
        Clocked(tmp_path / name, step_s, stepped_at, is_old=is_old).write()
        facts = collect_run_facts(tmp_path / name)
        told.append(build_run_json(facts) | {"run_dir": ""})
        seen.append([envelope.event for envelope in EventTail(tmp_path / name).read_new_events()])
        if not is_old:
            after = [facts.timeline.elapsed_s(envelope) for envelope in facts.story]
            assert after == sorted(after)
            assert facts.timeline.alive_s == pytest.approx(73, abs=2)
    assert told[1]["status"] == "finished"
    assert seen[0] == seen[1]
    # without another clock the wall's is all there is; where the run itself said how long, that
    # counts
    if is_old:
        told = [facts | {"wall_s": 0, "reliability": {}} for facts in told]
    assert {
        key: (told[0][key], told[1][key]) for key in told[0] if told[0][key] != told[1][key]
    } == {}


def test_ranks_of_two_machines_whose_clocks_have_nothing_in_common() -> None:
    here = [Envelope(events.Note(f"a{n}"), 0, 0, 100.0 + n, n, 50.0 + n) for n in range(3)]
    there = [Envelope(events.Note(f"b{n}"), 1, 0, 100.2 + n, n, 900_000.2 + n) for n in range(3)]
    assert [e.event.code for e in sort_events([*there, *here])] == [
        "a0",
        "b0",
        "a1",
        "b1",
        "a2",
        "b2",
    ]


def test_a_line_without_a_sound_clock_is_no_event(tmp_path: Path) -> None:
    line = json.loads(Envelope(events.Note("n"), 0, 0, 1.0, 3, 2.0).to_line())
    wrong = [("seq", value) for value in ("3", -7, 10**30)]
    wrong += [("monotonic_s", value) for value in (None, "now", 10**400, math.inf)]
    for number, (key, value) in enumerate(wrong):
        path = build_event_file_path(tmp_path / str(number), 0, 0)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(line | {key: value}) + "\n")
        tail = EventTail(tmp_path / str(number))
        assert (tail.read_new_events(), tail.num_unreadable) == ([], 1), (key, value)


HERE, THERE = "a" * 16, "b" * 16


class TwoHours:
    """Writes the files of a run of two hours: a step every ten minutes, on two ranks.

    `uptimes_s` by rank: what the rank's clock shows when it starts. A run without clocks that have
    names is an old one.
    """

    def __init__(self, run_dir: Path, uptimes_s: dict[int, float], names: dict[int, str]) -> None:
        self.dir, self._uptimes_s, self._names = run_dir, uptimes_s, names
        self._num_told: dict[int, int] = {}

    def say(self, after_s: float, event: Event, rank: int) -> None:
        at_rank = max(rank, 0)
        began_s, seq = self._uptimes_s[at_rank], self._num_told.get(rank, 0)
        self._num_told[rank] = seq + 1
        clock = MonotonicClockReading(self._names.get(at_rank, ""), began_s) if seq == 0 else None
        sealed = Envelope(event, rank, 0, 1_700_000_000.0 + after_s, seq, began_s + after_s, clock)
        path = build_event_file_path(self.dir, rank, 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(sealed.to_line() + "\n")

    def write(self, *, is_supervised: bool) -> None:
        if is_supervised:
            self.say(0.0, events.RanksStarted([1], 0.1), -1)
        self.say(1.0, events.RunStarted("r", "d", 2, 0, 12, "cpu", {}, startup_s=1.0), 0)
        self.say(1.05, events.Note("ready 1"), 1)
        for number in range(1, 13):
            for rank in self._uptimes_s:
                after_s = 600.0 * number + rank / 10
                self.say(
                    after_s,
                    StepFinished(
                        number, 2.0, 1, number, 0.1, 0.1, 600, 1, {"forward": 1.0}, 0.0, 1
                    ),
                    rank,
                )
        for rank in self._uptimes_s:
            self.say(7205.0 + rank, events.Note(f"late {rank}"), rank)
        self.say(7210.0, events.RunFinished("finished", 0, 12, 7210.0), 0)
        self.say(7211.0, events.RunFinished("finished", 0, 12, 7211.0), -1)


UPTIMES_S = [
    {0: 5000.0, 1: 5000.0},
    {0: 5000.0, 1: 900_000.0},
    {0: 900_000.0, 1: 5000.0},
    {0: 5000.0, 1: 8000.0},
]


@pytest.mark.parametrize("uptimes_s", UPTIMES_S)
@pytest.mark.parametrize("is_supervised", [True, False])
def test_a_run_of_hours_ends_with_its_end(
    tmp_path: Path, uptimes_s: dict[int, float], is_supervised: bool
) -> None:
    """Another launcher's ranks have no supervisor that speaks before the end; a rank may say little
    but steps until then.

    Its machine is known by the name of its clock, not by the time.
    """
    names = {0: HERE, 1: HERE if uptimes_s[0] == uptimes_s[1] else THERE}
    TwoHours(tmp_path, uptimes_s, names).write(is_supervised=is_supervised)
    facts = collect_run_facts(tmp_path)
    assert facts.status == "finished"
    told = [
        e.event.code if isinstance(e.event, events.Note) else e.event.kind() for e in facts.story
    ]
    assert told == [
        *["ranks_started"][: int(is_supervised)],
        "run_started",
        "ready 1",
        "late 0",
        "late 1",
        "run_finished",
    ]
    steps = EventTail(tmp_path, all_ranks=True).read_new_events()
    assert [(e.event.step, e.rank) for e in steps if isinstance(e.event, StepFinished)] == [
        (step, rank) for step in range(1, 13) for rank in (0, 1)
    ]


@pytest.mark.parametrize("is_supervised", [True, False])
@pytest.mark.parametrize("uptime_s", [5000.0, 900_000.0])
def test_a_run_of_hours_of_an_earlier_release_ends_with_its_end(
    tmp_path: Path, uptime_s: float, is_supervised: bool
) -> None:
    TwoHours(tmp_path, {0: 5000.0, 1: uptime_s}, {}).write(is_supervised=is_supervised)
    facts = collect_run_facts(tmp_path)
    assert facts.status == "finished"
    told = [
        e.event.code if isinstance(e.event, events.Note) else e.event.kind() for e in facts.story
    ]
    assert told[-3:] == ["late 0", "late 1", "run_finished"]


def test_a_resume_after_the_machine_was_started_anew(tmp_path: Path) -> None:
    """Its clock begins at zero again; the supervisor's file holds both."""
    for began_s, name, attempt in ((900_000.0, HERE, 0), (50.0, THERE, 1)):
        for rank, event in (
            (-1, events.RanksStarted([1], 0.1)),
            (0, events.Note(f"rank {attempt}")),
        ):
            clock = MonotonicClockReading(name, began_s)
            line = Envelope(event, rank, attempt, 1.0, 0, began_s, clock).to_line() + "\n"
            line += (
                Envelope(events.Note(f"end {rank}"), rank, attempt, 1.0, 1, began_s + 9).to_line()
                + "\n"
            )
            path = build_event_file_path(tmp_path, rank, attempt)
            path.parent.mkdir(exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                file.write(line)
    seen = EventTail(tmp_path).read_new_events()
    assert [(e.attempt, e.rank) for e in seen] == [
        (0, -1),
        (0, 0),
        (0, -1),
        (0, 0),
        (1, -1),
        (1, 0),
        (1, -1),
        (1, 0),
    ]
    assert {e.clock.name for e in seen if e.clock and e.attempt == 1} == {THERE}


def test_only_the_first_event_of_a_process_names_its_clock(tmp_path: Path) -> None:
    bus = Bus(rank=3, run_dir=tmp_path)
    for number in range(3):
        bus.emit(events.Note(f"n{number}"))
    bus.close()
    lines = build_event_file_path(tmp_path, 3, 0).read_text().splitlines()
    assert [json.loads(line).get("clock") for line in lines] == [
        build_monotonic_clock_id() or None,
        None,
        None,
    ]


def test_the_clock_of_this_machine_has_one_name() -> None:
    others = subprocess.run(
        [
            sys.executable,
            "-c",
            "from phalanx.core.clocks import build_monotonic_clock_id; print(build_monotonic_clock_id())",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert others.stdout.strip() == build_monotonic_clock_id()


@pytest.mark.parametrize("kind", EVENT_CLASS_OF_KIND)
def test_a_reader_can_check_every_field(kind: str) -> None:
    """A type that it does not know would end every report of a run with such an event."""
    event_class = EVENT_CLASS_OF_KIND[kind]
    names = [name for name, _, _ in _list_field_checks(event_class)]
    assert names == list(event_class.__dataclass_fields__)


@pytest.mark.parametrize("torn", [b'{"event":"run_fini', b"\0" * 100], ids=["cut", "zeros"])
def test_a_line_that_a_killed_command_left_torn_costs_no_other(tmp_path: Path, torn: bytes) -> None:
    """A kill in the middle of a write, a power cut: the next command of the run goes on in the
    supervisor's file."""
    path = build_event_file_path(tmp_path, -1, 0)
    for attempt in range(3):
        bus = Bus(rank=-1, attempt=attempt, run_dir=tmp_path)
        bus.emit(events.Note("resumed", {"attempt": attempt}))
        bus.close()
        if attempt != 1:
            with path.open("ab") as file:
                file.write(torn)
    notes = read_recorded_events(tmp_path, events.Note, rank=-1)
    assert [note.event.facts["attempt"] for note in notes] == [0, 1, 2]
    assert path.read_bytes().count(b"\n") == 4  # the torn part between the first two, too
