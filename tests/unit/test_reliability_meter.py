"""The hours of a run: what part of each stands, also where a failure undid steps of the hour before."""

from __future__ import annotations

import math
from typing import Any

import pytest

from phalanx.observe.events import (
    CheckpointSaved,
    Envelope,
    Event,
    RankFailed,
    ReliabilityMeasured,
    RunStarted,
    StepFinished,
    StepSkipped,
)
from phalanx.observe.tail import parse_valid_event_line
from phalanx.run.reliability_meter import HOUR_S, ReliabilityMeter

BEGAN_S = 100.0


def hear(meter: ReliabilityMeter, event: Event, *, rank: int = 0, attempt: int = 0) -> None:
    meter.add_event(Envelope(event, rank, attempt, 1e9, 0, BEGAN_S))


def do_steps(
    meter: ReliabilityMeter,
    first: int,
    last: int,
    phases_s: dict[str, float] | None = None,
    *,
    attempt: int = 0,
) -> None:
    """Steps of 10 s each."""
    for step in range(first, last + 1):
        values: dict[str, Any] = {
            "step": step,
            "loss": 5.0,
            "num_targets": 1,
            "tokens_seen": step,
            "learning_rate": 0.1,
            "grad_norm": 1.0,
            "step_s": 10.0,
            "tokens_per_s": 1.0,
            "phases_s": phases_s or {},
            "unaccounted_s": 0.0,
            "rss_bytes": 1,
        }
        # What other ranks say of the same step counts once.
        for rank in (0, 1):
            hear(meter, StepFinished(**values), rank=rank, attempt=attempt)


def start(num_ranks: int, step: int) -> RunStarted:
    return RunStarted("run", "digest", num_ranks, step, 1000, "cpu", {})


def test_hours_have_the_steps_that_stand() -> None:
    meter = ReliabilityMeter(BEGAN_S, 4)
    hear(meter, start(4, 0))
    do_steps(meter, 1, 300)
    assert meter.take_hour(BEGAN_S + HOUR_S - 1.0) is None
    hour = meter.take_hour(BEGAN_S + HOUR_S)
    assert hour is not None
    assert (hour.hour, hour.goodput, hour.participation) == (0, 3000 / 3600, 1.0)
    assert math.isnan(hour.mean_between_failures_s)
    # As it is read again from the file.
    line = Envelope(hour, -1, 0, 1e9, 0, BEGAN_S).to_line()
    read = parse_valid_event_line(line.encode())
    assert read is not None
    assert read.event.goodput == hour.goodput
    # A failure undoes steps of this hour; half of the ranks go on.
    do_steps(meter, 301, 340)
    hear(meter, RankFailed(1, 340, "forward", "signal", "killed", 0.01), rank=-1)
    hear(meter, CheckpointSaved(330, "step-330", 100, wall_s=1.0, stall_s=0.5))
    hear(meter, start(2, 330))
    do_steps(meter, 331, 360)
    end = meter.take_end(BEGAN_S + HOUR_S + 1200.0)
    assert end is not None
    assert (end.hour, end.hour_s, end.goodput) == (1, 1200.0, 0.5)
    assert end.participation == pytest.approx((30 * 4 + 30 * 2) / (60 * 4))
    assert (end.num_failures, end.mean_between_failures_s) == (1, 4800.0)
    assert end.best_save_every_s == pytest.approx(math.sqrt(2 * 0.5 * 4800.0))


def test_steps_of_the_hour_before_that_are_done_again_count_where_they_stand() -> None:
    meter = ReliabilityMeter(BEGAN_S, 2)
    hear(meter, start(2, 0))
    do_steps(meter, 1, 300)
    first = meter.take_hour(BEGAN_S + HOUR_S)
    hear(meter, start(2, 290))
    do_steps(meter, 291, 310)
    second = meter.take_end(BEGAN_S + 2 * HOUR_S)
    assert isinstance(first, ReliabilityMeasured)
    assert second is not None
    assert second.goodput == 200 / 3600


def test_a_short_run_without_a_failure_says_nothing() -> None:
    meter = ReliabilityMeter(BEGAN_S, 2)
    hear(meter, start(2, 0))
    do_steps(meter, 1, 3)
    assert meter.take_end(BEGAN_S + 60.0) is None
    hear(meter, RankFailed(1, 3, "forward", "signal", "killed", 0.01), rank=-1)
    end = meter.take_end(BEGAN_S + 60.0)
    assert end is not None
    assert end.goodput == 0.5


def test_waiting_for_data_saving_and_evaluating_do_not_stand() -> None:
    """As the goodput of the page has it."""
    meter = ReliabilityMeter(BEGAN_S, 2)
    hear(meter, start(2, 0))
    waits_s = {"data": 1.0, "ckpt_write": 0.5, "evaluate": 0.5, "forward": 3.0, "backward": 5.0}
    do_steps(meter, 1, 100, waits_s)
    hour = meter.take_hour(BEGAN_S + HOUR_S)
    assert hour is not None
    assert hour.goodput == pytest.approx(100 * 8.0 / HOUR_S)


def test_steps_that_were_not_applied_are_no_goodput() -> None:
    meter = ReliabilityMeter(BEGAN_S, 2)
    hear(meter, start(2, 0))
    for step in range(1, 361):
        if step % 2:
            hear(meter, StepSkipped(step, "nonfinite_gradients", math.nan, 0, 1))
        do_steps(meter, step, step)
    hour = meter.take_hour(BEGAN_S + HOUR_S)
    assert hour is not None
    assert (hour.goodput, hour.participation) == (0.5, 1.0)


def test_a_skipped_step_that_is_applied_after_a_restart_stands() -> None:
    meter = ReliabilityMeter(BEGAN_S, 2)
    hear(meter, start(2, 0))
    do_steps(meter, 1, 4)
    hear(meter, StepSkipped(5, "nonfinite_gradients", 1.0, 0, 4))
    do_steps(meter, 5, 5)
    hear(meter, RankFailed(1, 6, "forward", "signal", "killed by SIGKILL", 0.1), rank=-1)
    hear(meter, start(2, 4), attempt=1)
    do_steps(meter, 5, 10, attempt=1)
    hour = meter.take_hour(BEGAN_S + HOUR_S)
    assert hour is not None
    assert hour.goodput == pytest.approx(10 * 10.0 / HOUR_S)
