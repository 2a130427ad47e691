"""The judge of slow ranks, on series of steps made by hand and on one recorded from a real run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from phalanx.launch.own_step import OwnStep, read_own_step
from phalanx.launch.slow_ranks import MIN_SLOW_S, WINDOW, SlowRankJudge, SlowRankWatch
from phalanx.observe.bus import Bus
from phalanx.observe.events import Envelope, Event, RankSlow, RankSlowEnded, StepFinished
from phalanx.observe.tail import EventTail
from phalanx.observe.words import describe_event
from phalanx.run.supervised import find_slow_ranks

RECORDED = Path(__file__).parents[1] / "golden" / "own-seconds-of-ranks.json"
NUM_RANKS = 4
Factor = Callable[[int, int], float]


def draw_steps(
    num_steps: int, factor: Factor = lambda step, rank: 1.0, *, seed: int = 0, spread: float = 0.15
) -> list[dict[int, OwnStep]]:
    """Steps of 800 ms: each rank differs by `spread`, one step in a hundred of a rank takes 2 to
    10 times as long, and the whole machine breathes."""
    random_number = random.Random(seed)
    found, breath = [], 0.0
    for number in range(num_steps):
        breath = 0.95 * breath + random_number.gauss(0.0, 0.05)
        of_ranks = {}
        for rank in range(NUM_RANKS):
            seconds = 0.8 * 2.0 ** (breath + random_number.gauss(0.0, spread))
            if random_number.random() < 0.01:
                seconds *= random_number.uniform(2.0, 10.0)
            of_ranks[rank] = seconds * factor(number, rank)
        slowest = max(of_ranks.values())
        found.append(
            {
                rank: OwnStep({"backward": seconds}, slowest - seconds, slowest, seconds)
                for rank, seconds in of_ranks.items()
            }
        )
    return found


def judge(steps: list[dict[int, OwnStep]], **options: int) -> list[Event]:
    judge = SlowRankJudge(len(steps[0]), **options)
    return [event for number, step in enumerate(steps) for event in judge.add_step(number, step)]


@pytest.mark.parametrize(
    ("num_steps", "spread"),
    [
        *((2_500, spread) for spread in (0.05, 0.15, 0.3)),
        *(pytest.param(10_000, spread, marks=pytest.mark.long) for spread in (0.05, 0.15, 0.3)),
    ],
)
def test_no_healthy_step_is_called_slow(num_steps: int, spread: float) -> None:
    assert judge(draw_steps(num_steps, spread=spread, seed=int(100 * spread))) == []


@pytest.mark.parametrize(("queued_share", "is_slow"), [(0.0, True), (0.12, False)])
def test_beside_the_work_of_others_a_rank_must_be_slower_to_be_named(
    queued_share: float, is_slow: bool
) -> None:
    """In a soak on a loaded machine a core did a fifth less for some seconds, and its rank was
    called slow."""
    steps = []
    for number in range(200):
        active_s = {0: 0.8 if number < 100 else 0.8 * 1.22, 1: 0.8}
        of_ranks = {}
        for rank, seconds in active_s.items():
            self_s = seconds / (1.0 - queued_share)
            waiting_s = max(active_s.values()) / (1.0 - queued_share) - self_s
            queued_s = queued_share * self_s
            of_ranks[rank] = OwnStep(
                {"backward": self_s}, waiting_s, self_s + waiting_s, seconds, queued_s
            )
        steps.append(of_ranks)
    assert bool(judge(steps)) == is_slow


@pytest.mark.parametrize(
    ("slow_factor", "spread"), [(1.3, 0.1), (1.3, 0.15), (2.0, 0.1), (5.0, 0.1)]
)
@pytest.mark.parametrize("seed", range(5))
def test_a_slow_rank_is_named_within_20_steps_and_again_when_it_is_over(
    slow_factor: float, spread: float, seed: int
) -> None:
    first, last = 200, 300

    def factor(step: int, rank: int) -> float:
        return slow_factor if rank == 2 and first <= step < last else 1.0

    begun, ended = judge(draw_steps(500, factor, seed=seed, spread=spread))
    assert isinstance(begun, RankSlow)
    assert begun.slow_rank == 2
    assert first < begun.step <= first + 20
    assert begun.first_step > first - WINDOW
    assert begun.factor > 1.2
    assert begun.phase == "backward"
    assert begun.waited_s > 0
    assert isinstance(ended, RankSlowEnded)
    assert ended.slow_rank == 2
    assert last < ended.step <= last + 2 * WINDOW
    # Three others wait what it takes longer; accidents of the slow rank come on top.
    expected_s = 3 * (last - first) * 0.8 * (slow_factor - 1)
    assert 0.7 * expected_s < ended.waited_s < 3.0 * expected_s


def test_a_rank_that_is_stopped_half_of_the_time() -> None:
    """Every other step takes three times as long."""
    found = judge(draw_steps(300, lambda n, rank: 3.0 if rank == 1 and n > 200 and n % 2 else 1.0))
    assert [event.slow_rank for event in found if isinstance(event, RankSlow)] == [1]
    assert found[0].step <= 220  # type: ignore[attr-defined]


def test_accidents_of_peers_hide_no_slow_rank() -> None:
    """Two steps of the other rank take eight times as long, which is more than all that the slow
    one takes longer in its window."""
    first = 100
    steps = []
    for number in range(first + 20):
        seconds = {0: 0.6, 1: 0.78 if number >= first else 0.6}
        if number in (first + 2, first + 5):
            seconds[0] = 4.8
        slowest = max(seconds.values())
        steps.append(
            {
                rank: OwnStep({"backward": own_s}, slowest - own_s, slowest, 0.0)
                for rank, own_s in seconds.items()
            }
        )
    (found,) = judge(steps)
    assert isinstance(found, RankSlow)
    assert found.slow_rank == 1
    assert 0 < found.excess_s < 0.24


def test_what_slows_a_rank_down_for_four_seconds_is_no_slow_rank() -> None:
    """In steps of 20 ms, 130 of which take the rank 1.5 times as long; what lasts is told."""

    def slow_down(num_steps: int) -> list[dict[int, OwnStep]]:
        steps = []
        for number in range(2000):
            is_slow = 1200 <= number < 1200 + num_steps
            seconds = {0: 0.02, 1: 0.03 if is_slow else 0.02}
            slowest = max(seconds.values())
            steps.append(
                {
                    rank: OwnStep({"backward": own_s}, slowest - own_s, slowest, 0.0)
                    for rank, own_s in seconds.items()
                }
            )
        return steps

    assert judge(slow_down(130)) == []
    (begun, ended) = judge(slow_down(400))
    assert isinstance(begun, RankSlow)
    assert begun.slow_rank == 1
    # A sample of short steps may begin before.
    assert 1200 - 0.375 / 0.02 <= begun.first_step <= 1200
    assert 1200 + MIN_SLOW_S / 0.03 <= begun.step <= 1200 + 7.0 / 0.03
    assert isinstance(ended, RankSlowEnded)


def test_slow_from_the_first_step_on() -> None:
    (found,) = judge(draw_steps(40, lambda step, rank: 2.0 if rank == 3 else 1.0, spread=0.1))
    assert isinstance(found, RankSlow)
    assert found.slow_rank == 3


def test_ranks_of_other_stages_are_no_peers() -> None:
    """The first of two stages has twice the work; the second rank of it becomes slow."""

    def factor(step: int, rank: int) -> float:
        slow = 1.5 if rank == 1 and step >= 100 else 1.0
        return slow * (2.0 if rank < 2 else 1.0)

    (found,) = judge(draw_steps(200, factor, spread=0.1), num_stages=2)
    assert isinstance(found, RankSlow)
    assert found.slow_rank == 1
    # A stage of one rank has none.
    assert judge(draw_steps(200, factor), num_stages=4) == []


def test_no_rank_of_a_recorded_run_is_slow() -> None:
    """Seconds of the own work of four ranks on two cores, beside other programs; as if steps took
    a hundred times as long."""
    rows = json.loads(RECORDED.read_text())["self_ms"]
    assert len(rows) >= 300
    steps = []
    for row in rows:
        slowest = max(row) / 1e1
        steps.append(
            {
                rank: OwnStep({"backward": ms / 1e1}, slowest - ms / 1e1, slowest, 0.0)
                for rank, ms in enumerate(row)
            }
        )
    assert judge(steps) == []
    # The same, where one rank takes half as long again.
    for step in steps[200:]:
        seconds = 1.5 * step[1].self_s
        step[1] = OwnStep({"backward": seconds}, 0.0, max(seconds, step[1].step_s), 0.0)
    slow = [event for event in judge(steps) if isinstance(event, RankSlow)]
    assert slow[0].slow_rank == 1


def finished(step: int, **phases_s: float) -> StepFinished:
    step_s = sum(phases_s.values())
    return StepFinished(step, 1.0, 1, 1, 0.1, 1.0, step_s, 1.0, phases_s, 0.0, 1, cpu_s=step_s)


def test_steps_are_put_together_from_events_of_all_ranks() -> None:
    watch = SlowRankWatch(2)
    found: list[Event] = []
    for number in range(1, 41):
        for rank in (1, 0):
            seconds = 0.3 if rank else 0.1
            event = finished(number, forward=seconds, collective=0.3 - seconds)
            found += watch.add(rank, 0, event)
    assert [(type(event), event.slow_rank) for event in found] == [(RankSlow, 1)]  # type: ignore[attr-defined]
    assert found[0].peers_cpu_share == pytest.approx(3.0)  # type: ignore[attr-defined]
    # Another attempt: what was slow is over.
    (ended,) = watch.add(0, 1, finished(30, forward=0.1))
    assert isinstance(ended, RankSlowEnded)
    # That it is as fast as the others again nobody has seen, and nobody says.
    assert ended.with_attempt
    assert describe_event(Envelope(ended, -1, 1, 0.0)) is None
    assert watch.add(0, 0, finished(41, forward=0.1)) == []


def test_steps_on_record_are_judged_as_ranks_write_them(tmp_path: Path) -> None:
    """What a run's supervisor does a few times a second."""
    buses = [Bus(rank=rank, run_dir=tmp_path) for rank in range(2)]
    steps = EventTail(tmp_path, all_ranks=True, kinds=(StepFinished,))
    watch, found = SlowRankWatch(2), []
    for number in range(1, 41):
        for rank, bus in enumerate(buses):
            seconds = 0.3 if rank else 0.1
            bus.emit(finished(number, forward=seconds, collective=0.3 - seconds))
        found += find_slow_ranks(steps, watch)
    for bus in buses:
        bus.close()
    found += find_slow_ranks(steps, watch)
    assert [(type(event), event.slow_rank) for event in found] == [(RankSlow, 1)]  # type: ignore[attr-defined]


def test_saves_and_evaluations_are_no_steps() -> None:
    assert read_own_step(finished(1, forward=1.0, ckpt_write=0.1)) is None
    assert read_own_step(finished(1, forward=1.0, evaluate=0.1)) is None
    assert read_own_step(finished(1, collective=1.0)) is None
    step = read_own_step(finished(1, forward=1.0, backward=2.0, record=4.0, collective=8.0))
    assert step is not None
    assert (step.self_s, step.waiting_s, step.step_s) == (3.0, 8.0, 15.0)


def make_busy_steps(active_s: float, queued_s: float) -> list[dict[int, OwnStep]]:
    """200 steps of two ranks that work for 50 ms and want a processor for 50 ms more; then 100 in
    which rank 1 works for `active_s` and wants one for `queued_s`."""
    usual = OwnStep({"forward": 0.1}, 0.0, 0.1, 0.05, 0.05)
    own_s = active_s + queued_s
    other = OwnStep({"forward": own_s}, 0.0, own_s, 0.05, queued_s)
    return [{0: usual, 1: usual}] * 200 + [{0: usual, 1: other}] * 100


def test_a_rank_that_has_no_processor_is_not_slow_by_its_steps() -> None:
    assert judge(make_busy_steps(active_s=0.05, queued_s=0.25)) == []


def test_a_slow_rank_is_found_where_all_want_for_processors() -> None:
    """Also one that sleeps, or reads. By the clock it takes 1.15 times as long."""
    (slow,) = judge(make_busy_steps(active_s=0.07, queued_s=0.045))
    assert isinstance(slow, RankSlow)
    assert slow.slow_rank == 1
    assert 1.2 <= slow.factor <= 1.401
    assert 0 < slow.excess_s <= 0.0201


def test_a_rank_that_nobody_waits_for_is_not_slow() -> None:
    """It works for longer on a core that is slow for a while, and its peer has none for as long."""
    assert judge(make_busy_steps(active_s=0.07, queued_s=0.03)) == []


def test_the_phase_that_is_named_is_that_of_most_steps() -> None:
    """The newest step, in which another phase takes long, does not decide."""
    usual = OwnStep({"forward": 0.1, "backward": 0.1}, 0.0, 0.2, 0.2)
    slow = OwnStep({"forward": 0.2, "backward": 0.1}, 0.0, 0.3, 0.3)
    odd = OwnStep({"forward": 0.1, "backward": 0.4}, 0.0, 0.5, 0.5)
    steps = [{0: usual, 1: usual}] * 100 + [{0: usual, 1: slow}] * 40
    (found,) = judge(steps)
    assert isinstance(found, RankSlow)
    steps[found.step] = {0: usual, 1: odd}
    (again,) = judge(steps)
    assert isinstance(again, RankSlow)
    assert again.step == found.step
    assert again.phase == found.phase == "forward"


def test_the_phase_of_a_slow_rank_is_named_where_its_peer_wants_for_a_processor() -> None:
    """By the clock its forward is as long as that of the peer, and its data takes longer."""
    peer = OwnStep({"data": 0.01, "forward": 0.5}, 0.0, 0.51, 0.3, 0.2)
    usual = OwnStep({"data": 0.10, "forward": 0.3}, 0.11, 0.51, 0.4)
    slow = OwnStep({"data": 0.10, "forward": 0.5}, 0.0, 0.60, 0.6)
    (found,) = judge([{0: peer, 1: usual}] * 100 + [{0: peer, 1: slow}] * 80)
    assert isinstance(found, RankSlow)
    assert (found.slow_rank, found.phase) == (1, "forward")


def test_how_busy_the_machine_was_before_hides_no_slow_rank() -> None:
    """For 100 steps other programs have one rank's processor by turns, and seconds by the clock
    say that it usually takes two to four times as long."""
    random_number = random.Random(1)
    steps = []
    for number in range(160):
        queued_s = random_number.choice([0.5, 1.5]) if number < 100 else 0.0
        own_s = 0.7 if number >= 120 else 0.5
        steps.append(
            {
                0: OwnStep({"forward": 0.5}, 0.0, 0.5, 0.5),
                1: OwnStep({"forward": own_s + queued_s}, 0.0, own_s + queued_s, own_s, queued_s),
            }
        )
    (slow,) = judge(steps)
    assert isinstance(slow, RankSlow)
    assert (slow.slow_rank, slow.step <= 140) == (1, True)


@pytest.mark.parametrize("num_ranks", [2, 3, 6, 7])
def test_each_rank_is_held_beside_the_median_of_the_others(num_ranks: int) -> None:
    """All ranks take different times; the slowest is named by the median of its peers."""
    seconds = {rank: 1.0 + 0.01 * rank for rank in range(num_ranks - 1)} | {num_ranks - 1: 2.0}
    steps = {rank: OwnStep({"forward": own_s}, 0.0, 2.0, own_s) for rank, own_s in seconds.items()}
    (found,) = judge([steps] * 40)
    assert isinstance(found, RankSlow)
    assert found.slow_rank == num_ranks - 1
    others = [own_s for rank, own_s in seconds.items() if rank != num_ranks - 1]
    assert found.factor == pytest.approx(2.0 / median(others))


def test_waits_that_end_without_a_processor_leave_work_to_compare() -> None:
    """The kernel also counts what a rank wants a processor for after a wait."""
    steps = []
    for number in range(200):
        own_s = 0.02 if number >= 100 else 0.01
        steps.append(
            {
                rank: OwnStep({"forward": own_s if rank else 0.01}, 0.1, 0.12, 0.01, 0.03)
                for rank in range(2)
            }
        )
    assert judge(steps) == []
