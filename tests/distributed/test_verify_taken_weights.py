"""Rows of the trainer judge how a run takes the weights of model.init_from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_verify_trainer import check_all_is_judged

from models import CPU
from phalanx.core.errors import CheckpointError
from phalanx.job.schema import Job
from phalanx.run import weights
from phalanx.verify import rank as verify_rank
from phalanx.verify import taken_weights
from phalanx.verify.payloads import VerifyCase, VerifyPayload
from phalanx.verify.row import ROWS_FILE_NAME, Row
from phalanx.verify.scope import UNREAD_INITIAL_WEIGHTS, list_unread_weights
from phalanx.verify.taken_weights import TAKEN_WEIGHTS_JUDGED, judge_taken_weights
from phalanx.verify.trainer_cases import TrainerCase, make_trainer_cases, make_trainer_job
from phalanx.verify.verified_job import make_verified_job, shrink_job
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


def make_case(init_from: str | None) -> tuple[Job, VerifyCase]:
    sections = {"model": {"init_from": init_from}, "data": {"seq_len": 16}}
    job = make_verified_job(shrink_job(Job.model_validate(sections), num_blocks=1)[0], NUM_RANKS)
    made = make_trainer_cases(make_trainer_job(job), num_ranks=NUM_RANKS, cluster=CPU, shape=None)
    (case,) = (
        VerifyCase("float64", case.name, case.parallel, case.plan, case.other_name, case.other_plan)
        for case in made
        if isinstance(case, TrainerCase) and case.name == "trainer-zero3"
    )
    return job, case


def judge_run(rank: int, init_from: str | None, folder: Path) -> None:
    job, case = make_case(init_from)
    verify_rank.run_verify_cases(VerifyPayload(job, folder, None, 2, NUM_RANKS, "small", (case,)))


def judge(folder: Path, init_from: str | None) -> Row:
    """The row of a run through the trainer, which stays in `folder`."""
    run_ranks(NUM_RANKS, judge_run, init_from, folder)
    (line,) = (folder / ROWS_FILE_NAME).read_text().splitlines()
    return Row.from_json(json.loads(line))


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Row]:
    """The folder of a run that is right, and its row."""
    folder = tmp_path_factory.mktemp("judged")
    return folder, judge(folder, "weights")


def judge_again(rank: int, folder: Path, row: Row, plant: Callable[[], None]) -> Row:
    """The row of the same run, whose weights are taken with a bug."""
    plant()
    job, case = make_case("weights")
    return judge_taken_weights(row, make_trainer_job(job), case.plan, folder / case.name)


def test_weights_are_taken_as_they_are_saved(judged: tuple[Path, Row]) -> None:
    _, row = judged
    assert row.ok, row.first
    assert TAKEN_WEIGHTS_JUDGED in row.judged
    check_all_is_judged(row)


@pytest.mark.long
def test_a_run_that_takes_no_weights_is_not_judged_by_them(tmp_path: Path) -> None:
    row = judge(tmp_path, None)
    assert row.ok, row.first
    assert TAKEN_WEIGHTS_JUDGED not in row.judged


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
    judged: tuple[Path, Row], plant: Callable[[], None], name: str, words: str
) -> None:
    row, *_ = run_ranks(NUM_RANKS, judge_again, *judged, plant)
    assert row.ok is False
    assert (row.first.what, row.first.name) == ("initial weight", name)
    assert words in row.first.cause
    assert "model.init_from" in row.first.cause


def test_a_job_says_that_its_own_weights_are_not_read() -> None:
    assert list_unread_weights(Job()) == []
    job = Job.model_validate({"model": {"init_from": "weights"}})
    assert list_unread_weights(job) == [UNREAD_INITIAL_WEIGHTS]
