"""Phases: each second is charged once, exceptions leave the stack sane, and the black box
outlives its writer."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core import phases as phases_module
from phalanx.core.black_box import BlackBox
from phalanx.core.black_box_reader import read_last_position
from phalanx.core.phases import PHASES, PhaseTimer


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    a_clock = Clock()
    monkeypatch.setattr(phases_module, "time", a_clock)
    return a_clock


def test_a_nested_phase_takes_its_seconds_from_the_outer(clock: Clock) -> None:
    phases = PhaseTimer()
    with phases("backward"):
        clock.now += 1
        with phases("collective"):
            clock.now += 10
            with phases("optimizer"):
                clock.now += 100
            clock.now += 1000
        clock.now += 10000
    clock.now += 5  # nobody's
    assert phases.take() == {"backward": 10001, "collective": 1010, "optimizer": 100}
    assert phases.take() == {}


def test_what_happens_apart_is_charged_to_no_step(clock: Clock) -> None:
    phases = PhaseTimer()
    with phases("forward"):
        clock.now += 1
    with contextlib.suppress(KeyError), phases.exclude_from_step() as inside, phases("evaluate"):
        clock.now += 10
        with phases("collective"):
            clock.now += 100
        raise KeyError
    with phases("forward"):
        clock.now += 1000
    assert inside == {"evaluate": 10, "collective": 100}
    assert phases.take() == {"forward": 1001}


Tree = list[tuple[str, int, "Tree"]]
trees = st.recursive(
    st.just([]),
    lambda inner: st.lists(
        st.tuples(st.sampled_from(PHASES), st.integers(0, 9), inner), max_size=3
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(trees)
def test_seconds_add_up_to_what_passed(tree: Tree) -> None:
    """Whatever the nesting, also of a phase in itself: nothing is counted twice, and nothing is
    lost."""
    a_clock, phases = Clock(), PhaseTimer()

    def run(nodes: Tree) -> int:
        spent = 0
        for name, seconds, inner in nodes:
            with phases(name):
                a_clock.now += seconds
                spent += seconds + run(inner)
        return spent

    original, phases_module.time = phases_module.time, a_clock  # type: ignore[attr-defined]
    try:
        assert run(tree) == sum(phases.take().values())
    finally:
        phases_module.time = original  # type: ignore[attr-defined]


def test_take_charges_open_phases_up_to_now(clock: Clock) -> None:
    phases = PhaseTimer()
    with phases("startup"):
        clock.now += 3
        assert phases.take() == {"startup": 3}
        clock.now += 4
    assert phases.take() == {"startup": 4}


def test_an_exception_leaves_the_stack_as_it_was(clock: Clock) -> None:
    phases = PhaseTimer()
    with phases("startup"):
        with contextlib.suppress(ValueError), phases("backward"):
            phases.enter("collective")  # a hook whose leave never comes
            clock.now += 1
            raise ValueError
        assert phases.current == "startup"
        clock.now += 2
    assert phases.current == ""
    assert phases.take() == {"startup": 2, "collective": 1, "backward": 0}


@pytest.mark.parametrize("outer", [True, False])
def test_a_listener_that_raises_leaves_no_phase_open(outer: bool) -> None:
    """As injected faults do."""

    def strike(step: int, name: str) -> None:
        if name == "forward":
            raise RuntimeError("struck")

    phases = PhaseTimer(listeners=(strike,))
    if outer:
        phases.enter("startup")
    with pytest.raises(RuntimeError, match="struck"), phases("forward"):
        pass
    assert phases.current == ("startup" if outer else "")


def test_listeners_hear_step_and_phase_on_entry() -> None:
    heard: list[tuple[int, str]] = []
    phases = PhaseTimer(listeners=(lambda step, name: heard.append((step, name)),))
    phases.step = 7
    with phases("forward"), phases("collective"):
        pass
    assert heard == [(7, "forward"), (7, "collective")]


def test_a_listener_that_comes_later_hears_what_begins_from_then_on_of_other_threads_too() -> None:
    heard: list[tuple[int, str]] = []
    phases = PhaseTimer()
    with phases("forward"):
        pass
    phases.add_listener(lambda step, name: heard.append((step, name)))
    phases.step = 4
    with phases("backward"), phases.for_thread(3)("ckpt_write"):
        pass
    assert heard == [(4, "backward"), (3, "ckpt_write")]


def test_an_unknown_phase_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="lunch"), PhaseTimer()("lunch"):
        pass


# The black box


def test_the_box_says_the_innermost_open_phase(tmp_path: Path) -> None:
    path = tmp_path / "a" / "box"
    phases = PhaseTimer(BlackBox(path))
    assert read_last_position(path) is None
    phases.step = 3
    began = time.monotonic()
    with phases("backward"):
        with phases("collective", "all_reduce gradients"):
            place = read_last_position(path)
            assert place is not None
            assert place[:4] == (3, place.monotonic_s, "collective", "all_reduce gradients")
            assert began <= place.monotonic_s <= time.monotonic()
        outer = read_last_position(path)
        assert outer is not None
        assert (outer.phase, outer.collective) == ("backward", "")


def test_long_names_are_cut_and_still_read(tmp_path: Path) -> None:
    box = BlackBox(tmp_path / "box")
    box.write(1, "forward", "é" * 79)
    place = read_last_position(tmp_path / "box")
    assert place is not None
    assert place.collective.startswith("é" * 39)


@pytest.mark.parametrize("content", [None, b"", b"short"])
def test_no_box_is_none(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "box").write_bytes(content)
    assert read_last_position(tmp_path / "box") is None


def test_the_box_can_be_read_after_kill_9(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        phases = PhaseTimer(BlackBox(tmp_path / "box"))
        phases.step = 41
        phases.enter("collective", "all_gather parameters")
        os.write(writer, b"x")
        signal.pause()
        os._exit(0)
    os.read(reader, 1)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
    assert os.WTERMSIG(status) == signal.SIGKILL
    place = read_last_position(tmp_path / "box")
    assert place is not None
    assert (place.step, place.phase, place.collective) == (
        41,
        "collective",
        "all_gather parameters",
    )


def test_the_black_box_tells_where_an_exception_was_raised_and_what_lies_behind(
    tmp_path: Path,
) -> None:
    phases = PhaseTimer(BlackBox(tmp_path / "box"))
    phases.step = 3

    def told() -> tuple[str, str]:
        place = read_last_position(tmp_path / "box")
        assert place is not None
        return place.phase, place.collective

    with phases("backward"):
        with phases("collective", "all_reduce gradients"):
            assert told() == ("collective", "all_reduce gradients")
        assert told() == ("backward", "")
    with phases("collective", "all_reduce step facts"):
        pass
    assert told() == ("collective", ""), "this rank waits for nobody any more"
    with (
        contextlib.suppress(ValueError),
        phases("backward"),
        phases("collective", "all_reduce gradients"),
    ):
        raise ValueError
    assert told() == ("collective", "all_reduce gradients"), "where it was raised"


def test_listeners_of_training_are_told_of_the_phase_that_goes_on() -> None:
    """Else what it does after a collective would be taken for the collective's."""
    training: list[tuple[int, str]] = []
    anywhere: list[tuple[int, str]] = []
    phases = PhaseTimer(
        None, (lambda *at: anywhere.append(at),), of_training=(lambda *at: training.append(at),)
    )
    with phases("forward"):
        with phases("collective", "all_gather"):
            pass
    assert training == [(0, "forward"), (0, "collective"), (0, "forward")]
    assert anywhere == [(0, "forward"), (0, "collective")]


def test_a_save_beside_training_does_not_tell_listeners_of_training() -> None:
    training: list[tuple[int, str]] = []
    anywhere: list[tuple[int, str]] = []
    phases = PhaseTimer(
        None, (lambda *at: anywhere.append(at),), of_training=(lambda *at: training.append(at),)
    )
    phases.step = 7
    with phases("forward"), phases.for_thread(5)("ckpt_write"):
        pass
    assert training == [(7, "forward")]
    assert anywhere == [(7, "forward"), (5, "ckpt_write")]


def test_collectives_are_charged_by_axis_and_operation(clock: Clock) -> None:
    phases = PhaseTimer()
    with phases("backward"):
        clock.now += 1
        with phases("collective", "all_gather sequence", axis="tp"):
            clock.now += 10
        with phases("collective", "all_reduce gradients", axis="dp"):
            clock.now += 100
        with phases("collective", "all_gather sequence", axis="tp"):
            clock.now += 1000
        with phases("collective", "something of a plugin"):
            clock.now += 10000
    assert phases.take() == {"backward": 1, "collective": 11110}
    assert phases.take_communication() == {
        "tp: all_gather sequence": 1010,
        "dp: all_reduce gradients": 100,
        "?: something of a plugin": 10000,
    }
    assert phases.take_communication() == {}


def test_collectives_apart_from_a_step_are_not_its_own(clock: Clock) -> None:
    phases = PhaseTimer()
    with phases("collective", "all_reduce step facts", axis="world"):
        clock.now += 1
    with phases.exclude_from_step(), phases("evaluate"), phases("collective", "x", axis="world"):
        clock.now += 10
    phases.take()
    assert phases.take_communication() == {"world: all_reduce step facts": 1}
