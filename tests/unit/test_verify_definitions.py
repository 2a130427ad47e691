"""The row "definitions" of verify: parts of training beside plain definitions of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from exam.plant import editing_loaded_modules, load_plant

from phalanx.job.learning_rate import RANDOM_WEIGHTS_LR, TRAINED_WEIGHTS_LR_OF_OPTIMIZER
from phalanx.job.load import load_job
from phalanx.job.presets import list_preset_names
from phalanx.job.schema import Job
from phalanx.verify.definitions import (
    draws,
    expert_products,
    optimizers,
    samples,
    settings,
    spikes,
    sums,
)
from phalanx.verify.definitions.check import FindDifferences
from phalanx.verify.definitions_row import CHECKS, compare_with_definitions
from phalanx.verify.plain.documented import (
    DEFAULT_OF_KEY,
    DEFAULT_OF_SHAPE_KEY,
    RANDOM_WEIGHTS_RATE,
    TRAINED_WEIGHTS_RATE_OF_OPTIMIZER,
)
from phalanx.verify.rate_definition import find_wrong_rate

DOCS = Path(__file__).parents[2] / "docs"


def test_the_code_as_it_is_equals_its_definitions() -> None:
    row = compare_with_definitions(Job(), "small")
    assert (row.ok, row.first) == (True, None)
    assert len(row.judged) == len(CHECKS)


@pytest.mark.parametrize(
    ("plant", "find_differences"),
    [
        ("large_initial_tensors_lose_their_tail", draws.find_wrong_draws),
        ("long_strided_runs_begin_at_other_places", draws.find_wrong_draws),
        ("neighbours_begin_with_the_same_weight", draws.find_wrong_draws),
        ("grouped_product_takes_begins_for_ends", expert_products.find_wrong_products),
        ("keys_that_are_false_are_ignored", settings.find_wrong_shape_keys),
        ("sums_of_16_bits_round_after_each_rank", sums.find_narrow_sums),
        ("ring_gradients_travel_in_the_compute_type", sums.find_narrow_sums),
        ("online_softmax_adds_up_in_the_compute_type", sums.find_narrow_sums),
        ("eps_at_least_that_of_float32", optimizers.find_wrong_updates),
        ("positions_never_begin_again_in_data", samples.find_wrong_samples),
        ("spike_is_applied", spikes.find_wrong_decisions),
    ],
)
def test_planted_bugs_differ_from_their_definition(
    plant: str, find_differences: FindDifferences
) -> None:
    with editing_loaded_modules(load_plant(plant), 0) as acted:
        first = next(find_differences(Job()), None)
    assert acted
    assert first is not None
    assert load_plant(plant).names_tensor(first.name), first.name
    assert load_plant(plant).names_cause(first.cause), first.cause
    assert " in step" not in str(first)
    assert "on rank" not in str(first)


def test_every_preset_has_the_numbers_that_it_says() -> None:
    for name in list_preset_names():
        job = load_job(None, [f"model.preset={name}"])
        assert list(settings.find_wrong_shape_keys(job)) == [], name


@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.kind=sgd", "optim.momentum=0"],
        ["optim.betas=[0.8, 0.99]", "optim.eps=1e-6", "optim.weight_decay=0.3"],
        ["precision.compute=fp16", "precision.loss_scale=512"],
        ["model.tie_embeddings=false", "model.norm_eps=1e-4"],
    ],
)
def test_a_job_that_says_its_numbers_equals_its_definitions(overrides: list[str]) -> None:
    job = load_job(None, overrides)
    for check in (
        optimizers.find_wrong_updates,
        settings.find_wrong_loss_scaling,
        settings.find_wrong_shape_keys,
    ):
        assert list(check(job)) == []


def test_what_an_own_optimizer_does_is_not_compared() -> None:
    job = load_job(None, ["optim.kind=package.module:build"])
    assert list(optimizers.find_wrong_updates(job)) == []


def test_the_documented_defaults_are_those_of_the_reference() -> None:
    documented: dict[str, str] = {}
    section = ""
    for line in (DOCS / "reference.md").read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"### \[(\w+)\]", line):
            section = match[1]
        elif section and (match := re.match(r"\| `(\w+)` \| .* \| ([^|]*) \| [^|]*\|$", line)):
            documented[f"{section}.{match[1]}"] = match[2].strip("`")
    for key, value in DEFAULT_OF_KEY.items():
        assert documented[key] == _write_default(value), key


def _write_default(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    return str(value)


def test_the_documented_defaults_of_models_are_those_of_their_page() -> None:
    text = (DOCS / "models.md").read_text(encoding="utf-8")
    (line,) = re.findall(
        r"- Where neither the job nor its preset says a key: .*?\.\n- ", text, re.S
    )
    values: dict[str, Any] = {}
    for assignment in re.findall(r"`([^`]+)`", line):
        values |= tomllib.loads(assignment)
    assert values == dict(DEFAULT_OF_SHAPE_KEY)


def test_the_documented_rates_are_those_of_the_reference() -> None:
    (line,) = [
        line
        for line in (DOCS / "reference.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `lr` |")
    ]
    assert f"{RANDOM_WEIGHTS_RATE:g}" == "0.003"
    assert "3e-3 for random weights" in line
    assert "2e-5, and 1e-3 with sgd" in line
    assert TRAINED_WEIGHTS_RATE_OF_OPTIMIZER == {"adamw": 2e-5, "sgd": 1e-3}
    assert RANDOM_WEIGHTS_LR == RANDOM_WEIGHTS_RATE
    assert TRAINED_WEIGHTS_LR_OF_OPTIMIZER == TRAINED_WEIGHTS_RATE_OF_OPTIMIZER


@pytest.mark.parametrize("plant", ["random_weights_get_a_third_of_the_rate"])
def test_another_default_rate_is_found(plant: str) -> None:
    with editing_loaded_modules(load_plant(plant), 0):
        difference = find_wrong_rate(Job())
    assert difference is not None
    assert "by the schedule" in difference.cause
