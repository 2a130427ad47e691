"""The learning rate of training beside a definition of its own, over the steps of a job."""

from __future__ import annotations

from typing import Any

import pytest

import phalanx.verify.rate_definition
from phalanx.job.schema import Job
from phalanx.verify.rate_definition import find_wrong_rate

JOBS: list[dict[str, Any]] = [
    {},
    {"schedule": "linear", "min_lr_ratio": 0.1},
    {"schedule": "constant", "warmup_steps": 0},
    {"schedule": "wsd", "decay_fraction": 0.23, "warmup_steps": 7},
    {"kind": "sgd", "lr_scaling": "auto", "reference_batch_size": 4},
    {"lr_scaling": "linear", "reference_batch_size": 64, "lr": 0.5},
]


@pytest.mark.parametrize("steps", [1, 3, 30, 500, 100_000])
@pytest.mark.parametrize("optim", JOBS, ids=str)
def test_rates_of_training_are_those_of_the_definition(optim: dict[str, Any], steps: int) -> None:
    assert find_wrong_rate(Job.model_validate({"optim": optim, "train": {"steps": steps}})) is None


def test_the_first_wrong_rate_is_named_with_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    right = phalanx.verify.rate_definition.learning_rate
    monkeypatch.setattr(
        phalanx.verify.rate_definition,
        "learning_rate",
        lambda job, step, peak: right(job, step, peak) * (1.01 if step == 4997 else 1),
    )
    wrong = find_wrong_rate(Job.model_validate({"train": {"steps": 5000}}))
    assert wrong is not None
    assert wrong.what == "learning rate"
    assert "in step 4997 of 5,000" in wrong.cause
