"""Learning rates at the corners of each schedule."""

from __future__ import annotations

import itertools
import math

import pytest

from phalanx.job.learning_rate import count_warmup_steps
from phalanx.job.schema import Job
from phalanx.optim.schedule import learning_rate

TOTAL = 100
SEARCHED_SCHEDULES = ("cosine", "linear", "wsd", "constant")


def optim(schedule: str, steps: int = TOTAL, **changed: object) -> Job:
    body = {
        "schedule": schedule,
        "lr": 1.0,
        "warmup_steps": 10,
        "min_lr_ratio": 0.1,
        "decay_fraction": 0.2,
    }
    return Job.model_validate({"train": {"steps": steps}, "optim": body | changed})


def rates(a: Job) -> list[float]:
    return [learning_rate(a, step) for step in range(1, a.train.steps + 1)]


@pytest.mark.parametrize("schedule", SEARCHED_SCHEDULES)
def test_warm_up_is_a_line_from_the_first_step_to_the_peak(schedule: str) -> None:
    assert rates(optim(schedule))[:10] == pytest.approx([step / 10 for step in range(1, 11)])


@pytest.mark.parametrize("schedule", SEARCHED_SCHEDULES)
def test_without_warm_up_no_step_is_above_the_peak_or_zero(schedule: str) -> None:
    found = rates(optim(schedule, warmup_steps=0))
    assert max(found) <= 1.0
    assert min(found) > 0
    assert found[0] > 0.99


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_last_step_has_the_lowest_rate_and_none_rises_after_warm_up(schedule: str) -> None:
    found = rates(optim(schedule))
    assert found[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(found[9:]))
    assert learning_rate(optim(schedule), TOTAL + 5) == pytest.approx(0.1)  # and stays there


def test_half_way_down() -> None:
    """Step 55 is half of the 90 steps after warm-up; cosine and line meet there.

    Step 32 is a quarter.
    """
    for schedule in ("cosine", "linear"):
        assert learning_rate(optim(schedule), 55) == pytest.approx(0.55)
    quarter = 22 / 90
    assert learning_rate(optim("linear"), 32) == pytest.approx(1 - 0.9 * quarter)
    assert learning_rate(optim("cosine"), 32) == pytest.approx(
        0.1 + 0.45 * (1 + math.cos(math.pi * quarter))
    )


def test_wsd_is_flat_then_a_line_over_the_last_fifth() -> None:
    found = rates(optim("wsd"))
    assert found[9:80] == [1.0] * 71
    assert found[80:] == pytest.approx([1 - 0.9 * step / 20 for step in range(1, 21)])


def test_wsd_without_decay_ends_in_one_step() -> None:
    assert rates(optim("wsd", decay_fraction=0.0))[-2:] == pytest.approx([1.0, 0.1])


def test_constant_is_constant() -> None:
    assert rates(optim("constant"))[9:] == [1.0] * 91


@pytest.mark.parametrize("schedule", SEARCHED_SCHEDULES)
def test_a_run_that_is_all_warm_up(schedule: str) -> None:
    assert rates(optim(schedule, 4, warmup_steps=4)) == pytest.approx([0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize("schedule", SEARCHED_SCHEDULES)
def test_a_scaled_peak_scales_every_step(schedule: str) -> None:
    """A batch of 16 where lr was tuned for 4, by the square root: twice the rate of each step."""
    scaled = rates(optim(schedule, lr_scaling="sqrt", reference_batch_size=4))
    assert scaled == pytest.approx([2 * rate for rate in rates(optim(schedule))])


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (9, 0), (20, 2), (60, 6), (499, 49), (500, 50), (100_000, 50)]
)
@pytest.mark.parametrize("schedule", SEARCHED_SCHEDULES)
def test_warm_up_that_nobody_set_is_a_tenth_of_the_run(
    schedule: str, steps: int, warmup: int
) -> None:
    """And the same, written out, is the same: neither is longer than the run."""
    job = optim(schedule, steps, warmup_steps=None)
    assert count_warmup_steps(job) == warmup
    for step in {1, max(1, warmup), max(1, steps // 2), steps}:
        assert learning_rate(job, step) == learning_rate(
            optim(schedule, steps, warmup_steps=warmup), step
        )
    assert warmup == 0 or learning_rate(job, warmup) == 1.0
