"""Asking a run for a trace: what it may answer, and what may happen to it meanwhile.

Ranks are told by the test, at the moments at which the command looks at how far they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.core.black_box import BlackBox, RankIdentity
from phalanx.core.errors import EnvironmentProblem, UsageError
from phalanx.core.step_ranges import StepRange
from phalanx.launch.paths import black_box_path
from phalanx.observe.trace_part import (
    PART_SCHEMA,
    TracePartHeader,
    TracePartWriter,
    trace_part_path,
)
from phalanx.observe.trace_request import (
    TraceAnswer,
    TraceRequest,
    TraceRequestInbox,
    write_trace_answer,
    write_trace_request,
)
from phalanx.run import live_trace
from phalanx.run.live_trace import TraceProgress, request_trace

STEPS = StepRange(5, 6)


class Run:
    """A run of two ranks, which does `deeds` one after another."""

    def __init__(self, run_dir: Path, *deeds: Callable[[Run], None]) -> None:
        self.run_dir, self.deeds, self.is_live = run_dir, list(deeds), True
        self.told: list[TraceProgress] = []
        self.request: TraceRequest | None = None
        self.box = self.open_box(0)

    def open_box(self, attempt: int) -> BlackBox:
        path = black_box_path(self.run_dir, 0)
        box = BlackBox(path, RankIdentity(0, 2, attempt, "cpu"))
        box.write(4, "forward")
        return box

    def go_on(self, progress: TraceProgress) -> None:
        self.told.append(progress)
        if self.deeds:
            self.deeds.pop(0)(self)

    def ask(self, *, timeout_s: float = 60.0) -> tuple[StepRange, list[int]]:
        steps, parts = request_trace(
            self.run_dir,
            STEPS.first,
            STEPS.num_steps,
            has_operators=False,
            timeout_s=timeout_s,
            tell=self.go_on,
        )
        return steps, [part.rank for part in parts]


def take(run: Run) -> None:
    run.request = TraceRequestInbox(run.run_dir).take_request()
    assert run.request is not None


def answer(run: Run, status: str = "accepted", why: str = "") -> None:
    assert run.request is not None
    write_trace_answer(run.run_dir, TraceAnswer(run.request.id, status, 4, 0, *STEPS, why))


def refuse(run: Run) -> None:
    answer(run, "refused", "step 5 is over")


def write_part(run: Run, rank: int, *, is_complete: bool) -> None:
    header = TracePartHeader(PART_SCHEMA, rank, 2, 0, *STEPS, False, "cpu", "host", 1, "one", "one")
    writer = TracePartWriter(trace_part_path(run.run_dir, rank, 0, STEPS), header)
    writer.close(is_complete=is_complete)


def write_first(run: Run) -> None:
    write_part(run, 0, is_complete=True)


def begin_second(run: Run) -> None:
    write_part(run, 1, is_complete=False)


def write_second(run: Run) -> None:
    write_part(run, 1, is_complete=True)


def end(run: Run) -> None:
    run.is_live = False


def restart(run: Run) -> None:
    run.open_box(1)


def ask_from_elsewhere(run: Run) -> None:
    write_trace_request(run.run_dir, TraceRequest("other", 9, 1))


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    def make(*deeds: Callable[[Run], None]) -> Run:
        run = Run(tmp_path, *deeds)
        monkeypatch.setattr(live_trace, "is_run_live", lambda run_dir: run.is_live)
        monkeypatch.setattr(live_trace, "_POLL_INTERVAL_S", 0.0)
        return run

    return make


def test_a_request_is_answered_and_all_parts_are_waited_for(make_run: Callable[..., Run]) -> None:
    run = make_run(take, answer, write_first, begin_second, write_second)
    assert run.ask() == (STEPS, [0, 1])
    assert [(each.step, each.last_step, each.is_accepted) for each in run.told] == [
        *[(4, 0, False)] * 2,
        *[(4, 6, True)] * 3,
    ]
    assert not run.deeds


@pytest.mark.parametrize(
    ("deeds", "error", "said"),
    [
        ((take, refuse), UsageError, "step 5 is over"),
        ((end,), EnvironmentProblem, "ended before it took"),
        ((take, end), EnvironmentProblem, "ended before it took"),
        ((take, answer, end), EnvironmentProblem, "ended before step 5"),
        ((take, answer, restart), EnvironmentProblem, "ended before step 5"),
        ((ask_from_elsewhere,), UsageError, "another phalanx trace"),
    ],
)
def test_what_may_come_instead(
    make_run: Callable[..., Run],
    deeds: tuple[Callable[[Run], None], ...],
    error: type[Exception],
    said: str,
) -> None:
    run = make_run(*deeds)
    with pytest.raises(error, match=said):
        run.ask()
    requests = list(run.run_dir.glob("traces/request.json"))
    assert bool(requests) == (ask_from_elsewhere in deeds), "another one's request stays"


@pytest.mark.parametrize("last", [end, restart])
def test_of_a_run_that_ends_inside_the_steps_the_parts_are_shown(
    make_run: Callable[..., Run], last: Callable[[Run], None]
) -> None:
    run = make_run(take, answer, write_first, begin_second, last)
    assert run.ask() == (STEPS, [0, 1])


@pytest.mark.parametrize(
    ("deeds", "said"), [((), "not answered in time"), ((take, answer), "not done in time")]
)
def test_the_wait_has_an_end(
    make_run: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
    deeds: tuple[Callable[[Run], None], ...],
    said: str,
) -> None:
    run = make_run(*deeds)
    now_s = iter(range(1000))
    monkeypatch.setattr(live_trace.time, "monotonic", lambda: next(now_s))
    with pytest.raises(EnvironmentProblem, match=said):
        run.ask(timeout_s=5)
    assert not list(run.run_dir.glob("traces/request.json"))
