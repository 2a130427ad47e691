"""What is said while no step ends: on a terminal it moves, in a log a line comes seldom."""

from __future__ import annotations

import io

import pytest

from phalanx.observe.activity import CurrentActivity
from phalanx.observe.console import open_console
from phalanx.observe.events import (
    Envelope,
    EvalFinished,
    Event,
    RestartScheduled,
    RunStarted,
    StepFinished,
    TextGenerated,
    WorkProgressed,
)
from phalanx.observe.progress import ProgressEmitter


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def started(step: int = 0, total: int = 100) -> RunStarted:
    return RunStarted("r", "d", 2, step, total, "cpu", {})


STEP = StepFinished(1, 2.5, 1, 1, 1e-3, 1.0, 0.1, 10.0, {}, 0.0, 2**20)


def test_what_a_run_is_at_follows_from_its_events() -> None:
    activity = CurrentActivity()
    assert activity.words == "starting the ranks"
    seen: list[tuple[Event, str]] = [
        (started(), "step 1, the first one, takes longer than others"),
        (STEP, ""),
        (WorkProgressed(50, "evaluate", 3, 64), "evaluating at step 50: 3 of 64 batches"),
        (EvalFinished(50, 1.0, 10, 0.1), ""),
        (RestartScheduled(1, 3, 40), "starting the ranks again"),
        (started(40), "step 41, the first one, takes longer than others"),
        (STEP, ""),
        (WorkProgressed(100, "evaluate", 1), "evaluating at step 100: 1 batch done"),
        (EvalFinished(100, 1.0, 10, 0.1), ""),
        (WorkProgressed(100, "sample", 5, 200), "sampling text at step 100: 5 of 200 tokens"),
        (TextGenerated(100, "a", "b"), ""),
        (started(100), ""),  # a run that was done already
    ]
    for event, words in seen:
        activity.take_event(event, 0)
        assert activity.words == words
    activity.take_event(WorkProgressed(1, "evaluate"), 0)
    activity.take_event(STEP, 1)  # another rank's step is no news of what rank 0 does
    assert activity.words


def test_a_log_gets_a_line_after_ten_seconds_and_twice_as_long_each_time() -> None:
    clock = Clock()
    activity = CurrentActivity(clock)
    said = {}
    for second in range(100):
        clock.now = float(second)
        if (line := activity.build_log_line_if_due()) is not None:
            said[second] = line
    assert list(said) == [10, 20, 40, 80]
    assert said[20] == "starting the ranks (20.0 s so far)"
    activity.take_event(WorkProgressed(50, "evaluate", 3, 64), 0)
    clock.now += 9
    activity.take_event(
        WorkProgressed(50, "evaluate", 30, 64), 0
    )  # the same evaluation: its clock goes on
    assert activity.build_log_line_if_due() is None
    clock.now += 1
    assert (
        activity.build_log_line_if_due()
        == "evaluating at step 50: 30 of 64 batches (10.0 s so far)"
    )


def test_a_terminal_shows_it_before_the_first_step_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    console = open_console(stream, total_steps=10, log_every=1, is_terminal=True)
    console.tick()
    assert "starting the ranks (" in stream.getvalue()
    console.write(Envelope(started(total=10), 0, 0, 1.0))
    console.write(Envelope(STEP, 0, 0, 1.0))
    console.write(Envelope(WorkProgressed(10, "evaluate", 7, 9), 0, 0, 1.0))
    console.close()
    assert "evaluating" not in stream.getvalue().rpartition("step  1/10")[2]


def test_progress_is_told_when_it_begins_and_seldom_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, found = Clock(), []
    teller = ProgressEmitter(found.append, 7, "evaluate", 1000, clock=clock)
    for number in range(1000):
        clock.now += 0.01
        teller.report_progress(number)
    assert found[0] == WorkProgressed(7, "evaluate", 0, 1000)
    assert 15 <= len(found) <= 21  # of ten seconds
