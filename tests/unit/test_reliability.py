"""How often a run failed, what part of its ranks took part, how often it should save."""

from __future__ import annotations

import math

import pytest

from phalanx.observe.events import (
    CheckpointSaved,
    Envelope,
    Event,
    RankFailed,
    ReliabilityMeasured,
    RolledBack,
    RunStarted,
)
from phalanx.report.facts import RunAttempt
from phalanx.report.reliability import measure_reliability
from phalanx.report.timeline import TimelineBuilder

FAILED = RankFailed(1, 7, "forward", "signal", "killed by SIGKILL", 0.01)
WENT_BACK = RolledBack(9, "corruption", "another bit", 5, -1, 2)


def save(step: int) -> CheckpointSaved:
    return CheckpointSaved(step, f"checkpoints/step-{step}", 100, wall_s=0.5, stall_s=0.2)


def at(seconds: float, event: Event) -> Envelope:
    return Envelope(event, -1, 0, 1e9 + seconds, seq=int(seconds), monotonic_s=1000.0 + seconds)


def start(num_ranks: int) -> RunStarted:
    return RunStarted("run", "digest", num_ranks, 0, 20, "cpu", {})


def test_two_failures_in_a_hundred_seconds() -> None:
    story = [
        at(0, start(4)),
        at(10, save(5)),
        at(30, FAILED),
        at(40, save(10)),
        at(60, FAILED),
        at(65, WENT_BACK),
        at(70, save(15)),
        at(100, save(20)),
    ]
    times = TimelineBuilder()
    for envelope in story:
        times.add_event(envelope)
    attempts = [RunAttempt(0, 1, start(4)), RunAttempt(1, 6, start(3), is_restart=True)]
    attempt_of_step = {step: int(step > 10) for step in range(1, 21)}
    found = measure_reliability(
        story, times.build_measured_timeline(), attempts, attempt_of_step, good_s=80.0
    )
    # Going back is no failure.
    assert found.num_failures == 2
    assert found.mean_between_failures_s == pytest.approx(50.0)
    assert found.goodput == pytest.approx(0.8)
    # Ten steps with four ranks of four, ten with three.
    assert found.participation == pytest.approx((10 * 4 + 10 * 3) / (20 * 4))
    assert found.save_every_s == pytest.approx(30.0)
    # Young: sqrt(2 x 0.2 s x 50 s).
    assert found.best_save_every_s == pytest.approx(math.sqrt(20.0))


def test_a_command_that_was_given_fewer_ranks_has_lost_none() -> None:
    """Three ranks, stopped and resumed with two, of which one is lost for five of ten steps."""
    attempts = [
        RunAttempt(0, 1, start(3)),
        RunAttempt(1, 11, start(2)),
        RunAttempt(2, 16, start(1), is_restart=True),
    ]
    attempt_of_step = {step: (step > 10) + (step > 15) for step in range(1, 21)}
    times = TimelineBuilder()
    times.add_event(at(0, start(3)))
    found = measure_reliability(
        [], times.build_measured_timeline(), attempts, attempt_of_step, good_s=1.0
    )
    assert found.participation == pytest.approx((10 * 3 + 5 * 2 + 5 * 1) / (10 * 3 + 10 * 2))


def test_a_run_without_failures_knows_no_rate() -> None:
    times = TimelineBuilder()
    story = [at(0, start(2)), at(10, save(5))]
    for envelope in story:
        times.add_event(envelope)
    found = measure_reliability(
        story, times.build_measured_timeline(), [RunAttempt(0, 1, start(2))], {1: 0}, good_s=5.0
    )
    assert found.num_failures == 0
    assert math.isnan(found.mean_between_failures_s)
    assert math.isnan(found.best_save_every_s)
    assert found.participation == 1.0


def test_one_failure_is_no_rate() -> None:
    hour = ReliabilityMeasured(0, 100.0, 0.8, 1.0, 1, 100.0, 0.2, 6.3)
    story = [at(0, start(2)), at(10, save(5)), at(30, FAILED), at(40, save(10)), at(100, hour)]
    times = TimelineBuilder()
    for envelope in story:
        times.add_event(envelope)
    found = measure_reliability(
        story, times.build_measured_timeline(), [RunAttempt(0, 1, start(2))], {1: 0}, good_s=5.0
    ).to_json()
    assert (found["num_failures"], found["alive_s"]) == (1, pytest.approx(100.0))
    assert found["mean_between_failures_s"] is None
    assert found["best_save_every_s"] is None
    least_s, most_s = found["mean_between_failures_interval_s"]
    assert least_s == pytest.approx(100 * 12.67 / 60, abs=0.1)
    assert most_s is None
    # What the supervisor wrote of its hour is that of one failure, too.
    assert found["hours"][0]["mean_between_failures_s"] is None
    assert found["hours"][0]["best_save_every_s"] is None
