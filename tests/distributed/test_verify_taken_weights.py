"""Rows of the trainer judge how a run takes the weights of model.init_from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models import CPU
from phalanx.core.errors import CheckpointError
from phalanx.job.schema import Job
from phalanx.run import weights
from phalanx.verify import rank as verify_rank
from phalanx.verify import taken_weights
from phalanx.verify.cases import make_verified_job, shrink_job
from phalanx.verify.payloads import VerifyCase, VerifyPayload
from phalanx.verify.row import ROWS_FILE_NAME
from phalanx.verify.scope import UNREAD_INITIAL_WEIGHTS, list_unread_weights
from phalanx.verify.taken_weights import TAKEN_WEIGHTS_JUDGED
from phalanx.verify.trainer_cases import TrainerCase, make_trainer_cases, make_trainer_job
from ranks import run_ranks

NUM_RANKS = 2


def leave_norms_as_drawn() -> None:
    load = weights.load_checkpoint_into_shards

    def load_but_norms(folder: Any, shards: Any, **options: Any) -> Any:
        drawn = {name: shards[name].tensor.clone() for name in shards if "norm" in name}
        manifest = load(folder, shards, **options)
        for name, values in drawn.items():
            shards[name].tensor.copy_(values)
        return manifest

    weights.load_checkpoint_into_shards = load_but_norms


def double_the_last_norm() -> None:
    fill = taken_weights.fill_model_with_initial_weights

    def fill_wrongly(initial: Any, model: Any, state: Any, bus: Any) -> None:
        fill(initial, model, state, bus)
        state.model.shards()["norm.weight"].tensor.detach().mul_(2)

    taken_weights.fill_model_with_initial_weights = fill_wrongly


def refuse() -> None:
    def fill(*args: Any) -> None:
        raise CheckpointError("it does not fit", why="nothing fits")

    taken_weights.fill_model_with_initial_weights = fill


def judge_run(
    rank: int, job: Job, cases: list[VerifyCase], directory: str, plant: Callable[[], None] | None
) -> None:
    if plant is not None:
        plant()
    verify_rank.run_verify_cases(
        VerifyPayload(job, Path(directory), None, 2, NUM_RANKS, "small", tuple(cases))
    )


def judge(tmp_path: Path, init_from: str | None, plant: Callable[[], None] | None) -> Any:
    sections = {"model": {"init_from": init_from}, "data": {"seq_len": 16}}
    job = make_verified_job(shrink_job(Job.model_validate(sections), num_blocks=2)[0], NUM_RANKS)
    made = make_trainer_cases(make_trainer_job(job), num_ranks=NUM_RANKS, cluster=CPU, shape=None)
    cases = [
        VerifyCase("float64", case.name, case.parallel, case.plan, case.other_name, case.other_plan)
        for case in made
        if isinstance(case, TrainerCase) and case.name == "trainer-zero3"
    ]
    run_ranks(NUM_RANKS, judge_run, job, cases, str(tmp_path), plant)
    (line,) = (tmp_path / ROWS_FILE_NAME).read_text().splitlines()
    return json.loads(line)


@pytest.mark.parametrize("init_from", [pytest.param(None, marks=pytest.mark.long), "weights"])
def test_weights_are_taken_as_they_are_saved(tmp_path: Path, init_from: str | None) -> None:
    row = judge(tmp_path, init_from, None)
    assert row["ok"], row["first"]
    assert (TAKEN_WEIGHTS_JUDGED in row["judged"]) == (init_from is not None)


@pytest.mark.parametrize(
    ("plant", "name", "words"),
    [
        (leave_norms_as_drawn, "blocks.0.attention_norm.weight", "leaves it as it was drawn"),
        pytest.param(
            double_the_last_norm,
            "norm.weight",
            "has others than a run that is resumed",
            marks=pytest.mark.long,
        ),
        (refuse, "", "nothing fits"),
    ],
)
def test_weights_that_are_not_taken_differ(
    tmp_path: Path, plant: Callable[[], None], name: str, words: str
) -> None:
    row = judge(tmp_path, "weights", plant)
    assert not row["ok"]
    first = row["first"]
    assert (first["what"], first["name"]) == ("initial weight", name)
    assert words in first["cause"]
    assert "model.init_from" in first["cause"]


def test_a_job_says_that_its_own_weights_are_not_read() -> None:
    assert list_unread_weights(Job()) == []
    job = Job.model_validate({"model": {"init_from": "weights"}})
    assert list_unread_weights(job) == [UNREAD_INITIAL_WEIGHTS]
