"""What does not count because it was skipped: the page, the metrics and the hours say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.observe.bus import Bus
from phalanx.observe.events import (
    Envelope,
    Event,
    RankFailed,
    RestartScheduled,
    RunStarted,
    StepFinished,
    StepSkipped,
)
from phalanx.observe.skipped_steps import SkippedSteps
from phalanx.observe.tail import EventTail
from phalanx.report.prometheus.step_metrics import StepMetrics
from phalanx.report.prometheus.values import MetricValues
from phalanx.report.reduce import collect_run_facts
from phalanx.run.reliability_meter import HOUR_S, ReliabilityMeter


def write_attempt(run_dir: Path, attempt: int, first: int, last: int, skipped: set[int]) -> None:
    """Steps of 10 s each."""
    bus = Bus(rank=0, attempt=attempt, run_dir=run_dir)
    bus.emit(RunStarted("run", "digest", 1, first - 1, 100, "cpu", {}))
    for step in range(first, last + 1):
        if step in skipped:
            bus.emit(StepSkipped(step, "nonfinite_gradients", 1.0, 0, 1))
        phases_s = {"forward": 4.0, "backward": 6.0}
        bus.emit(StepFinished(step, 2.0, 64, 64, 1e-3, 1.0, 10.0, 6.4, phases_s, 0.0, 2**28))
    bus.close()


def write_failure(run_dir: Path, attempt: int, step: int, from_step: int) -> None:
    bus = Bus(rank=-1, attempt=attempt, run_dir=run_dir)
    events: list[Event] = [
        RankFailed(0, step, "forward", "exception", "ValueError: x", 0.1),
        RestartScheduled(1, 3, from_step),
    ]
    for event in events:
        bus.emit(event)
    bus.close()


@pytest.mark.parametrize(
    ("skipped", "again", "num_applied"),
    [
        ({18}, set(), 40),  # applied when it was done again
        ({18}, {18}, 39),
        ({5}, set(), 39),  # not done again
        ({11}, set(), 40),  # the first that is
        ({20}, {12, 30}, 38),
    ],
)
def test_what_was_skipped_and_done_again_is_judged_alike_everywhere(
    tmp_path: Path, skipped: set[int], again: set[int], num_applied: int
) -> None:
    write_attempt(tmp_path, 0, 1, 20, skipped)
    write_failure(tmp_path, 0, 21, 10)
    write_attempt(tmp_path, 1, 11, 40, again)
    metrics, meter = StepMetrics(MetricValues()), ReliabilityMeter(0.0, 1)
    for envelope in EventTail(tmp_path).read_new_events():
        metrics.add_event(envelope)
        meter.add_event(envelope)
    facts = collect_run_facts(tmp_path)
    hour = meter.take_hour(HOUR_S)
    assert hour is not None
    assert 40 - len(facts.skipped) == num_applied
    assert facts.ledger.good_s == pytest.approx(10.0 * num_applied)
    assert metrics.productive_s == pytest.approx(10.0 * num_applied)
    assert hour.goodput * HOUR_S == pytest.approx(10.0 * num_applied)


def test_the_skip_of_a_later_attempt_counts_in_whatever_order_files_are_read() -> None:
    first, second = StepSkipped(3, "overflow", 1.0, 0, 1), StepSkipped(3, "no_targets", 1.0, 0, 1)
    told = [Envelope(first, 0, 0, 1e9), Envelope(second, 0, 1, 1e9)]
    for order in (told, told[::-1]):
        skips = SkippedSteps()
        for envelope in order:
            skips.add_event(envelope)
        assert skips.find_skip(3, 1) == second
        assert skips.find_skip(3, 2) is None
        assert skips.list_standing_skips({3: 1}) == [second]
        assert skips.list_standing_skips({3: 2}) == []
