"""When a save is due by the clock, and the interval that costs the least time."""

from __future__ import annotations

import math
import random

import pytest

from phalanx.checkpoint.writing.save_clock import (
    FIRST_AUTO_S,
    FIRST_AUTO_STEPS,
    SaveClock,
    compute_optimal_save_interval_s,
)
from phalanx.job.schema import Checkpoint


def lost(interval_s: float, stall_s: float, mtbf_s: float) -> float:
    """Part of the time that is lost: a save per interval, and half an interval done again per
    failure."""
    return stall_s / interval_s + interval_s / (2 * mtbf_s)


def test_no_other_interval_loses_less() -> None:
    draw = random.Random(5)
    for _ in range(200):
        stall_s, mtbf_s = 10 ** draw.uniform(-3, 2), 10 ** draw.uniform(3, 6)
        best = compute_optimal_save_interval_s(stall_s, 0.0, mtbf_s)
        assert best == pytest.approx(math.sqrt(2 * stall_s * mtbf_s))
        assert all(
            lost(best * factor, stall_s, mtbf_s) > lost(best, stall_s, mtbf_s)
            for factor in (0.5, 0.9, 1.1, 2)
        )


def test_never_more_often_than_a_save_takes() -> None:
    assert compute_optimal_save_interval_s(0.001, 90.0, 3600.0) == 90.0


def test_minutes_count_from_the_last_save() -> None:
    clock = SaveClock(Checkpoint(every_minutes=2.0), now_s=100.0)
    assert not clock.is_due(10**6, 219.9)
    assert clock.is_due(1, 220.0)
    clock.restart(230.0)
    assert not clock.is_due(1, 349.0)
    assert clock.is_due(1, 350.0)
    assert clock.record_save_cost(3, 1.0, 2.0) is None


def test_without_a_clock_nothing_is_due_by_time() -> None:
    assert not SaveClock(Checkpoint(every_steps=3), now_s=0.0).is_due(10**9, 1e9)


def test_auto_measures_early_and_says_what_it_chose() -> None:
    kept = Checkpoint(every="auto", mtbf_hours=10.0)
    clock = SaveClock(kept, now_s=0.0)
    assert not clock.is_due(FIRST_AUTO_STEPS - 1, FIRST_AUTO_S - 1)
    assert clock.is_due(FIRST_AUTO_STEPS, 0.1)
    assert clock.is_due(1, FIRST_AUTO_S)
    clock.restart(50.0)
    chosen = clock.record_save_cost(12, 2.0, 30.0)
    assert chosen is not None
    expected_s = math.sqrt(2 * 2.0 * 36000.0)
    assert (chosen.step, chosen.stall_s, chosen.save_s, chosen.mtbf_s) == (12, 2.0, 30.0, 36000.0)
    assert chosen.interval_s == pytest.approx(expected_s)
    assert not clock.is_due(10**6, 50.0 + expected_s - 1)
    assert clock.is_due(13, 50.0 + expected_s + 1)


def test_the_median_of_the_last_saves_counts_and_small_changes_are_not_said() -> None:
    """The first save also pays for its memory; one slow disk does not make saves rare for good."""
    clock = SaveClock(Checkpoint(every="auto", mtbf_hours=1.0), now_s=0.0)
    assert clock.record_save_cost(1, 8.0, 9.0) is not None
    assert clock.record_save_cost(2, 1.0, 2.0) is not None  # 4.5 s now
    assert clock.record_save_cost(3, 1.0, 2.0) is not None  # 1 s
    assert clock.record_save_cost(4, 1.2, 2.0) is None
    assert clock.record_save_cost(5, 500.0, 600.0) is None
    assert clock.interval_s == pytest.approx(math.sqrt(2 * 1.2 * 3600))


def test_the_first_of_several_intervals_counts() -> None:
    clock = SaveClock(Checkpoint(every="auto", mtbf_hours=1.0, every_minutes=1.0), now_s=0.0)
    clock.record_save_cost(1, 8.0, 9.0)  # each 240 s
    assert clock.is_due(2, 61.0)
