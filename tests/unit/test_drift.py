"""Drift is found where it was put in, and in no healthy series: seeded ones with noise, outliers,
steps up, settling caches, and saves.

Reference: the slope that was put in.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from test_report import Run, page_of, step

from phalanx.core.units import GIB, MIB
from phalanx.observe.events import Envelope, StepFinished
from phalanx.report.drift import is_leak, is_slowdown, measure_slope
from phalanx.report.prometheus.run_metrics import RunMetrics
from phalanx.report.reduce import collect_run_facts
from phalanx.report.summary import build_run_json

NUM_STEPS = 1000
SEEDS = range(40)


def draw_step_seconds(seed: int, drift: float = 0.0) -> list[float]:
    """Noise of 3 to 15 %, one step in fifty several times as long, first steps slow; `drift` of the
    whole run."""
    rng = random.Random(seed)
    noise = rng.uniform(0.03, 0.15)
    values = []
    for number in range(NUM_STEPS):
        value = 0.2 * (1 + drift * number / NUM_STEPS) * (1 + rng.gauss(0, noise))
        value *= 1 + 3 * math.exp(-number / 20)
        if rng.random() < 0.02:
            value *= rng.uniform(2, 8)
        values.append(max(value, 0.01))
    return values


def draw_memory(seed: int, leak_bytes: float = 0.0) -> list[float]:
    """Settles within some hundred steps, jumps by an evaluation's, flutters by a save's."""
    rng = random.Random(seed)
    settling, jump_at = rng.uniform(10, 80), rng.randrange(100, 900)
    values = []
    for number in range(NUM_STEPS):
        value = 2 * GIB + 400 * MIB * (1 - math.exp(-number / settling)) + rng.gauss(0, 8 * MIB)
        if number > jump_at:
            value += rng.uniform(0, 16 * MIB)
        if number % 100 < 3:
            value += 300 * MIB
        values.append(value + leak_bytes * number)
    return values


@pytest.mark.parametrize("seed", SEEDS)
def test_healthy_series_have_no_drift_and_drift_is_found(seed: int) -> None:
    steps = list(range(1, NUM_STEPS + 1))
    healthy = measure_slope(steps, draw_step_seconds(seed))
    assert healthy is not None
    assert not is_slowdown(healthy)
    slower = measure_slope(steps, draw_step_seconds(seed, drift=0.3))
    assert slower is not None
    assert is_slowdown(slower)
    # Of 0.2 s, in a thousand steps.
    assert slower.per_step == pytest.approx(0.3 * 0.2 / NUM_STEPS, rel=0.35)
    flat = measure_slope(steps, draw_memory(seed))
    assert flat is not None
    assert not is_leak(flat)
    leaking = measure_slope(steps, draw_memory(seed, leak_bytes=MIB))
    assert leaking is not None
    assert is_leak(leaking)
    assert leaking.per_step == pytest.approx(MIB, rel=0.1)


def test_a_short_series_says_nothing() -> None:
    assert measure_slope(list(range(200)), [float(number) for number in range(200)]) is None


def leaking_run(folder: Path) -> Run:
    """Rank 1 loses a mebibyte in each of 400 steps of its second attempt."""
    run = Run(folder)
    run.start(total=400)
    run.steps(range(1, 51))
    run.start(attempt=1, at=50, total=400)
    for number in range(51, 401):
        for rank in (0, 1):
            grown = GIB + rank * number * MIB
            values = vars(step(number, rank=rank)) | {"own_bytes": grown}
            run.say(StepFinished(**values), rank=rank, attempt=1)
    return run


def test_the_rank_that_leaks_is_named_everywhere(tmp_path: Path) -> None:
    run = leaking_run(tmp_path)
    facts = collect_run_facts(tmp_path)
    (drift,) = facts.drifts
    assert (drift.kind, drift.rank) == ("memory", 1)
    sentence = "memory of rank 1 grows and grows: 1 MiB a step"
    assert drift.describe().startswith(sentence)
    assert sentence in page_of(run).text
    (told,) = build_run_json(facts)["drifts"]
    assert told["per_step"] == pytest.approx(MIB)
    metrics = RunMetrics("run", {})
    for rank in (0, 1):
        for number in range(1, 401):
            values = vars(step(number, rank=rank)) | {"own_bytes": GIB + rank * number * MIB}
            metrics.add_event(Envelope(StepFinished(**values), rank, 0, 1.7e9 + number))
    snapshot = metrics.build_snapshot()
    assert snapshot.find_value("phalanx_memory_drift_bytes", "1") == pytest.approx(MIB)
    assert snapshot.find_value("phalanx_memory_drift_bytes", "0") == 0
    assert snapshot.find_value("phalanx_step_drift_ratio") == 0


def test_a_young_attempt_has_not_the_drift_of_the_one_before() -> None:
    metrics = RunMetrics("run", {})

    def tell_step(number: int, attempt: int, own_bytes: int) -> None:
        values = vars(step(number)) | {"own_bytes": own_bytes}
        metrics.add_event(Envelope(StepFinished(**values), 0, attempt, 1.7e9 + number))

    for number in range(1, 401):
        tell_step(number, 0, GIB + number * MIB)
    leaking = metrics.build_snapshot()
    assert leaking.find_value("phalanx_memory_drift_bytes", "0") == pytest.approx(MIB)
    for number in range(401, 501):
        tell_step(number, 1, GIB)
    young = metrics.build_snapshot()
    assert young.find_value("phalanx_memory_drift_bytes", "0") is None
    assert young.find_value("phalanx_step_drift_ratio") is None
