"""Events in the order in which they happened, whatever the wall clocks of their machines showed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from phalanx.observe import events
from phalanx.observe.bus import event_path
from phalanx.observe.events import Envelope, Event, StepFinished
from phalanx.observe.order import in_order
from phalanx.observe.tail import EventTail
from phalanx.report.reduce import reduce_run
from phalanx.report.summary import run_json

HOUR_S, DAY_S = 3600.0, 86400.0
BOOT_S = 5000.0


class Clocked:
    """Writes a run of two commands: 20 steps, a restart, 20 more; then a resume, 20 more. A second per event.

    From the event `stepped_at` on, every process's wall clock is off by `stepped_s`.
    """

    def __init__(self, run_dir: Path, stepped_s: float, stepped_at: int, *, is_old: bool = False) -> None:
        self.dir, self._stepped_s, self._stepped_at, self._is_old = run_dir, stepped_s, stepped_at, is_old
        self._num_told = 0

    def say(self, event: Event, attempt: int, rank: int = 0) -> None:
        self._num_told += 1
        now_s = BOOT_S + self._num_told
        wall_s = 1_700_000_000.0 + now_s + (self._stepped_s if self._num_told >= self._stepped_at else 0.0)
        seq, steady_s = (-1, math.nan) if self._is_old else (self._num_told, now_s)
        path = event_path(self.dir, rank, attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(Envelope(event, rank, attempt, wall_s, seq, steady_s).to_line() + "\n")

    def write(self) -> None:
        started = {"run": "r", "job_digest": "d", "world_size": 1, "total_steps": 60, "device": "cpu", "layout": {}}
        for attempt, (first, last) in enumerate(((1, 20), (21, 40), (41, 60))):
            if attempt != 1:
                self.say(events.Note("server_ready"), attempt, -1)
            self.say(events.RanksStarted([1], 0.1), attempt, -1)
            self.say(events.RunStarted(step=first - 1, startup_s=1.0, **started), attempt)
            for step in range(first, last + 1):
                self.say(StepFinished(step, 2.0, 1, step, 0.1, 0.1, 1.0, 1.0, {"forward": 1.0}, 0.0, 1), attempt)
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
        facts = reduce_run(tmp_path / name)
        told.append(run_json(facts) | {"run_dir": ""})
        seen.append([envelope.event for envelope in EventTail(tmp_path / name).poll()])
        if not is_old:
            after = [facts.timeline.after_s(envelope) for envelope in facts.story]
            assert after == sorted(after)
            assert facts.timeline.alive_s == pytest.approx(73, abs=2)
    assert told[1]["status"] == "finished"
    assert seen[0] == seen[1]
    if is_old:  # without another clock the wall's is all there is; where the run itself said how long, that counts
        told = [facts | {"wall_s": 0} for facts in told]
    assert {key: (told[0][key], told[1][key]) for key in told[0] if told[0][key] != told[1][key]} == {}


def test_ranks_of_two_machines_whose_clocks_have_nothing_in_common() -> None:
    here = [Envelope(events.Note(f"a{n}"), 0, 0, 100.0 + n, n, 50.0 + n) for n in range(3)]
    there = [Envelope(events.Note(f"b{n}"), 1, 0, 100.2 + n, n, 900_000.2 + n) for n in range(3)]
    assert [e.event.code for e in in_order([*there, *here])] == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_line_without_a_sound_clock_is_no_event(tmp_path: Path) -> None:
    line = json.loads(Envelope(events.Note("n"), 0, 0, 1.0, 3, 2.0).to_line())
    for key, value in (("seq", "3"), ("seq", -7), ("seq", 10**30), ("monotonic_s", None), ("monotonic_s", "now")):
        path = event_path(tmp_path / f"{key}-{value}", 0, 0)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(line | {key: value}) + "\n")
        tail = EventTail(tmp_path / f"{key}-{value}")
        assert (tail.poll(), tail.num_unreadable) == ([], 1), (key, value)
