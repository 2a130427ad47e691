"""Ranks that are kept from running, by what the kernel would say of them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from phalanx.launch import processor_watch
from phalanx.launch.processor_watch import (
    LOOK_INTERVAL_S,
    STARVED,
    STOPPED_BY_TURNS,
    ProcessorWatch,
)
from phalanx.observe.events import Event, RankSlow, RankSlowEnded

NUM_RANKS = 3


class Kernel:
    """What /proc says: the letter of each process, and seconds that it ran and was kept waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.letters = ["R"] * NUM_RANKS
        self.times = [(0.0, 0.0)] * NUM_RANKS
        monkeypatch.setattr(processor_watch, "read_state_letter", lambda pid: self.letters[pid])
        monkeypatch.setattr(processor_watch, "read_run_and_delay_s", lambda pid: self.times[pid])

    def run(self, rank: int, share: float, wanted: float = 1.0) -> None:
        """Until the next look the rank wants to run for a part `wanted` of the time, and gets
        `share` of that."""
        run_s, delay_s = self.times[rank]
        seconds = LOOK_INTERVAL_S * wanted
        self.times[rank] = (run_s + share * seconds, delay_s + (1 - share) * seconds)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def look(
    kernel: Kernel, num_looks: int, act: Callable[[int], None], *, goes_on: bool = True
) -> list[tuple[int, Event]]:
    """Events with the number of the look that they came with."""
    steps = [0]
    watch = ProcessorWatch(range(NUM_RANKS), 0.0, lambda rank: steps[0])
    found: list[tuple[int, Event]] = []
    for number in range(num_looks):
        steps[0] = number
        act(number)
        now_s = (number + 1) * LOOK_INTERVAL_S
        found += [(number, event) for event in watch.look(now_s, goes_on=goes_on)]
    found += [(num_looks, event) for event in watch.end()]
    return found


def test_ranks_that_share_a_loaded_machine_are_not_slow(kernel: Kernel) -> None:
    """All get about half of what they want, and differ by the moment, for twelve minutes."""
    drawn = random.Random(1)

    def act(number: int) -> None:
        for rank in range(NUM_RANKS):
            kernel.run(rank, min(1.0, max(0.0, drawn.gauss(0.5, 0.2))), drawn.uniform(0.2, 1.0))

    assert look(kernel, 10_000, act) == []


def test_no_rank_is_to_blame_where_all_are_starved(kernel: Kernel) -> None:
    """One gets steadily less than the others, who hardly get anything."""

    def act(number: int) -> None:
        for rank in range(NUM_RANKS):
            kernel.run(rank, 0.2 if rank == 1 else 0.35)

    assert look(kernel, 300, act) == []


def test_a_starved_rank_is_slow_until_it_gets_its_share(kernel: Kernel) -> None:
    def act(number: int) -> None:
        for rank in range(NUM_RANKS):
            is_starved = rank == 1 and 100 <= number < 300
            kernel.run(rank, 0.3 if is_starved else 0.95)

    (begun_at, begun), (ended_at, ended) = look(kernel, 500, act)
    assert isinstance(begun, RankSlow)
    assert (begun.slow_rank, begun.why) == (1, STARVED)
    assert begun.cpu_share == pytest.approx(0.3, abs=0.02)
    assert begun.peers_cpu_share == pytest.approx(0.95, abs=0.02)
    assert 100 < begun_at <= 100 + 4.2 / LOOK_INTERVAL_S
    assert isinstance(ended, RankSlowEnded)
    assert (ended.slow_rank, ended.first_step) == (1, begun.step)
    assert 300 < ended_at <= 300 + 4.2 / LOOK_INTERVAL_S


def test_a_rank_that_hardly_wants_to_run_is_not_starved(kernel: Kernel) -> None:
    def act(number: int) -> None:
        for rank in range(NUM_RANKS):
            kernel.run(rank, 0.3 if rank == 1 else 0.95, 0.1 if rank == 1 else 1.0)

    assert look(kernel, 200, act) == []


def test_a_rank_that_is_slow_when_its_attempt_ends_is_not_called_fast_again(
    kernel: Kernel,
) -> None:
    def act(number: int) -> None:
        is_stopped = number >= 50 and number % 4 < 2
        kernel.letters[2] = "T" if is_stopped else "R"
        for rank in range(NUM_RANKS):
            if rank != 2 or not is_stopped:
                kernel.run(rank, 1.0)

    (_, begun), (ended_at, ended) = look(kernel, 80, act)
    assert isinstance(begun, RankSlow)
    assert isinstance(ended, RankSlowEnded)
    assert (ended_at, ended.slow_rank, ended.with_attempt) == (80, 2, True)


def test_stopped_by_turns(kernel: Kernel) -> None:
    def act(number: int) -> None:
        is_stopped = 50 <= number < 150 and number % 4 < 2
        kernel.letters[2] = "T" if is_stopped else "R"
        for rank in range(NUM_RANKS):
            if rank != 2 or not is_stopped:
                kernel.run(rank, 1.0)

    (begun_at, begun), (ended_at, ended) = look(kernel, 300, act)
    assert isinstance(begun, RankSlow)
    assert (begun.slow_rank, begun.why) == (2, STOPPED_BY_TURNS)
    assert begun_at <= 58
    assert isinstance(ended, RankSlowEnded)
    assert 150 < ended_at <= 150 + 4.2 / LOOK_INTERVAL_S


@pytest.mark.parametrize(("are_steps_short", "within_ms"), [(False, 550), (True, 300)])
@pytest.mark.parametrize("begins_ms", range(0, 100, 7))
def test_a_rank_that_is_stopped_for_23_ms_of_each_100_is_told_soon(
    kernel: Kernel, begins_ms: int, are_steps_short: bool, within_ms: int
) -> None:
    """Whatever the looks have to do with the stops: a step may take 15 ms, and 20 of them count."""
    watch = ProcessorWatch(range(NUM_RANKS), 0.0)
    found: list[tuple[int, Event]] = []
    for now_ms in range(1, 3_000):
        is_stopped = now_ms >= 1_000 and (now_ms - begins_ms) % 100 < 23
        kernel.letters[1] = "T" if is_stopped else "R"
        for rank in range(NUM_RANKS):
            if rank != 1 or not is_stopped:
                run_s, delay_s = kernel.times[rank]
                kernel.times[rank] = (run_s + 0.001, delay_s)
        now_s = now_ms / 1000
        for event in watch.look(now_s, goes_on=True, are_steps_short=are_steps_short):
            found.append((now_ms, event))
    ((begun_ms, begun),) = found
    assert isinstance(begun, RankSlow)
    assert (begun.slow_rank, begun.why) == (1, STOPPED_BY_TURNS)
    assert begun_ms <= 1_000 + within_ms
    assert 1.1 <= begun.factor <= 1.8


def test_one_stop_is_no_slowness(kernel: Kernel) -> None:
    def act(number: int) -> None:
        is_stopped = 50 <= number < 90
        kernel.letters[0] = "T" if is_stopped else "R"
        for rank in range(NUM_RANKS):
            if rank or not is_stopped:
                kernel.run(rank, 1.0)

    assert look(kernel, 200, act) == []


def test_nothing_is_said_before_the_first_step_and_all_ends_with_the_attempt(
    kernel: Kernel,
) -> None:
    def act(number: int) -> None:
        for rank in range(NUM_RANKS):
            kernel.run(rank, 0.2 if rank == 0 else 1.0)

    assert look(kernel, 200, act, goes_on=False) == []
    (_, begun), (last, ended) = look(kernel, 200, act)
    assert isinstance(begun, RankSlow)
    assert isinstance(ended, RankSlowEnded)
    assert last == 200
