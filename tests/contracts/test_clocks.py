"""What phases are timed by: the host's clock, and events on the queue of a device.

One contract for both, and what the second one is for: time is charged to the phase whose work it
is, however late that work is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from phalanx.core import phases as phases_module
from phalanx.core.black_box import BlackBox
from phalanx.core.black_box_reader import read_last_position
from phalanx.core.phases import HostClock, PhaseClock, PhaseTimer
from phalanx.mesh.event_clock import CudaEventClock, create_phase_clock_for_device
from phalanx.train.pipeline_record import align_rank_clocks, convert_spans_to_seconds


@dataclass
class Queue:
    """A device that does what it is given in order, beside the host; seconds pass only where a
    test says so."""

    host_s: float = 50.0
    busy_until_s: float = 0.0
    num_waits: int = 0

    def perf_counter(self) -> float:
        return self.host_s

    def monotonic(self) -> float:
        return self.host_s

    def give(self, seconds: float) -> None:
        """Queue work of so many seconds; the call takes the host a hundredth of a second."""
        self.host_s += 0.01
        self.busy_until_s = max(self.busy_until_s, self.host_s) + seconds

    def record(self) -> Event:
        return Event(self, max(self.busy_until_s, self.host_s))

    def wait(self) -> None:
        self.host_s = max(self.host_s, self.busy_until_s)


@dataclass
class Event:
    """As torch.cuda.Event: milliseconds, and none before both events are done."""

    queue: Queue
    at_s: float

    def query(self) -> bool:
        return self.queue.host_s >= self.at_s

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return (end.at_s - self.at_s) * 1000

    def synchronize(self) -> None:
        self.queue.num_waits += 1
        self.queue.host_s = max(self.queue.host_s, self.at_s)


@dataclass
class Machine:
    """A clock, and what it times: `work(seconds)` is done on the host, or queued."""

    clock: PhaseClock
    work: Callable[[float], None]
    queue: Queue = field(default_factory=Queue)


@pytest.fixture(params=["host", "events"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    queue = Queue()
    if request.param == "events":
        return Machine(CudaEventClock(queue.record), queue.give, queue)
    monkeypatch.setattr(phases_module, "time", queue)

    def work(seconds: float) -> None:
        queue.host_s += seconds

    return Machine(HostClock(), work, queue)


def test_marks_are_apart_by_the_work_between_them(machine: Machine) -> None:
    marks = [machine.clock.mark()]
    for seconds in (1.0, 2.0, 4.0):
        machine.work(seconds)
        marks.append(machine.clock.mark())
    machine.clock.wait(marks[-1])
    found = [machine.clock.seconds(*pair) for pair in pairwise(marks)]
    assert found == pytest.approx([1, 2, 4], abs=0.02)
    assert machine.clock.seconds(marks[0], marks[-1]) == pytest.approx(
        sum(s for s in found if s is not None)
    )


def test_a_step_is_charged_where_its_work_is(machine: Machine) -> None:
    """The step waits for its device once, as the trainer does, in a phase that has no work of
    its own."""
    phases = PhaseTimer(clock=machine.clock)
    for _ in range(3):
        with phases("forward"):
            machine.work(2.0)
        with phases("backward"):
            machine.work(4.0)
            with phases("collective"):
                machine.work(1.0)
        with phases("optimizer"):
            machine.queue.wait()
        found = phases.take()
        assert {name: round(s, 1) for name, s in found.items() if round(s, 1)} == {
            "forward": 2.0, "backward": 4.0, "collective": 1.0,
        }  # fmt: skip
    assert machine.queue.num_waits == 0


def test_a_collective_that_is_only_queued_claims_no_seconds(
    machine: Machine, tmp_path: Path
) -> None:
    """FSDP's on a GPU: another stream has it, and what the computation waits for it is the
    computation's time."""
    heard: list[str] = []
    box = BlackBox(tmp_path / "box")
    phases = PhaseTimer(box, (lambda step, phase: heard.append(phase),), clock=machine.clock)
    with phases("forward"):
        machine.work(2.0)
        with phases.collective("all_gather parameters"):
            machine.work(1.0)  # by a clock of events: what was queued on its own stream
            inside = read_last_position(tmp_path / "box")
        after = read_last_position(tmp_path / "box")
    machine.queue.wait()
    found = {name: round(s, 1) for name, s in phases.take().items() if round(s, 1)}
    assert found == (
        {"forward": 3.0} if machine.clock.is_late else {"forward": 2.0, "collective": 1.0}
    )
    assert "collective" in heard, "where a fault strikes"
    assert inside is not None
    assert after is not None
    assert (inside.phase, inside.collective) == ("collective", "all_gather parameters")
    assert after.phase == "forward"
    box.close()


def test_what_happens_apart_is_charged_to_no_step(machine: Machine) -> None:
    phases = PhaseTimer(clock=machine.clock)
    with phases("optimizer"):
        machine.work(3.0)
    with phases.exclude_from_step() as inside, phases("evaluate"):
        machine.work(5.0)
    assert {name: round(s, 1) for name, s in inside.items()} == {"evaluate": 5.0}
    assert {name: round(s, 1) for name, s in phases.take().items()} == {"optimizer": 3.0}


def test_another_clock_goes_on_with_open_phases(machine: Machine) -> None:
    phases = PhaseTimer()
    phases.enter("startup")
    phases.replace_clock(machine.clock)
    machine.work(1.0)
    machine.queue.wait()
    phases.leave("startup")
    assert phases.take()["startup"] == pytest.approx(1.0, abs=0.05)
    assert phases.for_thread(3).clock.is_late is False


def test_spans_of_a_pipeline_have_the_length_of_their_work(machine: Machine) -> None:
    spans = []
    for action, seconds in (("0F0", 1.0), ("0F1", 2.0), ("0B0", 4.0)):
        begin = machine.clock.mark()
        machine.work(seconds)
        spans.append((action, begin, machine.clock.mark()))
    machine.work(8.0)  # the reduction
    machine.queue.wait()
    told = [
        convert_spans_to_seconds(machine.clock, machine.clock.mark(), spans, rank)
        for rank in (0, 1)
    ]
    rows = align_rank_clocks(told)
    assert rows[0] == rows[1]
    assert [(action, round(end - begin, 1)) for action, begin, end in rows[0]] == [
        ("0F0", 1),
        ("0F1", 2),
        ("0B0", 4),
    ]
    assert [round(b[1] - a[2], 1) for a, b in pairwise(rows[0])] == [0, 0]
    if machine.clock.is_late:
        assert told[0]["clock"] != told[1]["clock"], "events of two GPUs have nothing in common"
        assert rows[0][-1][2] == pytest.approx(-8.0, abs=0.05)


def test_queued_work_is_not_charged_before_it_is_done() -> None:
    """Nothing is waited for: what is still queued when a step's seconds are taken comes with the
    next step's."""
    queue = Queue()
    phases = PhaseTimer(clock=CudaEventClock(queue.record))
    with phases("forward"):
        queue.give(2.0)
    queue.wait()
    with phases("optimizer"):
        queue.give(1.0)
    assert {name: round(s, 1) for name, s in phases.take().items()} == {"forward": 2.0}
    queue.wait()
    assert {name: round(s, 1) for name, s in phases.take().items()} == {"optimizer": 1.0}
    assert queue.num_waits == 0


def test_marks_whose_seconds_nobody_takes_do_not_pile_up() -> None:
    queue = Queue()
    phases = PhaseTimer(clock=CudaEventClock(queue.record))
    for _ in range(20_000):
        with phases("forward"):
            queue.give(0.001)
            queue.wait()
    assert len(phases._queued) < 5_000
    assert phases.take()["forward"] == pytest.approx(20_000 * (0.001 + 0.01)), (
        "the device idles while it is given work"
    )


def test_a_cpu_is_timed_by_the_host() -> None:
    import torch

    assert isinstance(create_phase_clock_for_device(torch.device("cpu")), HostClock)
    assert abs(HostClock().mark() - time.perf_counter()) < 60
