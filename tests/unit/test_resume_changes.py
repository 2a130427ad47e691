"""A run that is continued with another job: every key that changed is named with what it does,
or refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.stores import open_store_of_run
from phalanx.core.errors import JobError, LayoutError
from phalanx.core.files import read_json, write_json_atomically
from phalanx.job.load import load_job
from phalanx.job.schema import Job
from phalanx.optim.schedule import learning_rate
from phalanx.plan.planner import make_plan
from phalanx.plan.precision import replace_precision
from phalanx.run.resume import _CHANGE_DESCRIPTIONS, load_resumed_job

SMALL = (
    "model.num_layers=4",
    "model.dim=32",
    "model.num_heads=4",
    "data.seq_len=32",
    "cluster.device=cpu",
)


def run_at(folder: Path, *overrides: str, step: int = 120) -> str:
    """The directory of a run as far as resuming reads it: its job, its plan and the manifest of
    a checkpoint."""
    job = load_job(None, [*SMALL, "train.steps=120", *overrides])
    plan = make_plan(job)
    job = replace_precision(job, plan.precision)
    write_json_atomically(folder / "job.json", job.to_json())
    write_json_atomically(folder / "plan.json", plan.to_json())
    if step:
        store = open_store_of_run(folder, None)
        store.commit(
            store.begin_draft(step), Manifest(step, "", {}, {"step": step}, {}, {}, {}).to_bytes()
        )
    return str(folder)


def test_the_same_job_has_nothing_to_say(tmp_path: Path) -> None:
    resumed = load_resumed_job(run_at(tmp_path, step=60), [])
    assert (resumed.step, resumed.changes, resumed.summary_lines()) == (60, (), [])
    assert resumed.facts()["told"] == "with the same job"


def test_a_job_file_that_was_edited_in_the_run_is_said(tmp_path: Path) -> None:
    run = run_at(tmp_path, "precision.compute=fp32", step=60)
    assert not load_resumed_job(run, []).is_job_edited
    job = read_json(tmp_path / "job.json")
    # A run that is moved stays the same run.
    job["run"]["dir"] = "elsewhere"
    write_json_atomically(tmp_path / "job.json", job)
    assert not load_resumed_job(run, []).is_job_edited
    job["run"]["seed"] += 1
    write_json_atomically(tmp_path / "job.json", job)
    resumed = load_resumed_job(run, [])
    assert resumed.is_job_edited
    (line,) = resumed.summary_lines()
    assert "job.json was edited" in line
    assert "job.json was edited" in resumed.facts()["told"]
    assert "job.json was edited" in load_resumed_job(run, ["train.steps=150"]).summary_lines()[0]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_more_steps_say_what_becomes_of_the_learning_rate_and_how_to_keep_it(
    tmp_path: Path, schedule: str
) -> None:
    """With the numbers of the schedule itself; what is said to keep the rate does."""
    run = run_at(tmp_path, f"optim.schedule={schedule}")
    was = load_job(None, [*SMALL, "train.steps=120", f"optim.schedule={schedule}"])
    resumed = load_resumed_job(run, ["train.steps=150"])
    (change,) = resumed.changes
    assert (change.key, change.before, change.after, change.is_other_training) == (
        "train.steps",
        120,
        150,
        True,
    )
    before, after = learning_rate(was, 120), learning_rate(resumed.job, 121)
    assert after > 1.5 * before
    said = "\n".join(resumed.summary_lines())
    assert "changed train.steps 120 -> 150: 30 steps left instead of 0" in said
    assert (
        f"the learning rate of step 121 is {after:.3g}; it was at step 120, the last one,"
        f" {before:.3g}" in said
    )
    assert "not the training that the run began with" in said
    keep = re.findall(r"optim\.\S+=\S+", resumed.rate)
    kept = load_resumed_job(run, ["train.steps=150", *keep])
    for step in (121, 135, 150):
        assert learning_rate(kept.job, step) == pytest.approx(before, rel=1e-3)
    assert kept.rate == ""


def test_a_constant_rate_does_not_change_with_the_steps(tmp_path: Path) -> None:
    resumed = load_resumed_job(run_at(tmp_path, "optim.schedule=constant"), ["train.steps=150"])
    assert resumed.rate == ""
    assert "schedule" not in resumed.changes[0].effect


def test_amid_a_run_the_rate_is_compared_with_that_of_the_same_step(tmp_path: Path) -> None:
    resumed = load_resumed_job(run_at(tmp_path, step=60), ["optim.lr=6e-3"])
    was = load_job(None, [*SMALL, "train.steps=120"])
    words = f"the learning rate of step 61 is {2 * learning_rate(was, 61):.3g}; it would have been"
    assert resumed.rate.startswith(f"{words} {learning_rate(was, 61):.3g} (2 x)")


def test_a_fallback_counts_from_the_checkpoint_that_it_goes_back_to(tmp_path: Path) -> None:
    run = run_at(tmp_path, step=60)
    run_at(tmp_path, step=90)
    (tmp_path / "checkpoints" / "step-90" / "unlisted").write_bytes(b"damage")
    resumed = load_resumed_job(run, ["checkpoint.fallback=true", "train.steps=150"])
    assert resumed.step == 60
    said = "\n".join(resumed.summary_lines())
    assert "continues from the newest checkpoint that verifies, with step 61" in said
    assert "how it is saved" not in said
    assert "90 steps left instead of 60" in said
    assert "the learning rate of step 61 is" in said


OTHERS: list[tuple[str, Any, bool]] = [
    ("train.global_batch_size", 32, True),
    ("optim.weight_decay", 0.3, True),
    ("precision.compute", "bf16", True),
    ("train.micro_batch_size", 1, False),
    ("eval.tokens", 1000, False),
    ("checkpoint.every_steps", 7, False),
    ("observe.log_every", 3, False),
    ("resilience.max_restarts", 1, False),
    ("run.name", "other", False),
    ("parallel.ranks", 4, False),
]


@pytest.mark.parametrize(("key", "value", "is_other"), OTHERS)
def test_every_change_is_named_with_what_it_does(
    tmp_path: Path, key: str, value: Any, is_other: bool
) -> None:
    resumed = load_resumed_job(run_at(tmp_path, "parallel.ranks=2", step=50), [f"{key}={value}"])
    changed = {change.key: change for change in resumed.changes}
    assert changed[key].after == value
    assert changed[key].effect
    assert resumed.is_other_training is is_other
    assert any(line.startswith(f"changed {key} ") for line in resumed.summary_lines())
    assert resumed.facts()["changed"][key][1] == value


def test_every_section_of_a_job_has_its_words() -> None:
    """A new section would fall through to words that say nothing."""
    known = {prefix.partition(".")[0] for prefix, *_ in _CHANGE_DESCRIPTIONS} | {"model"}
    assert set(Job.model_fields) <= known


@pytest.mark.parametrize(
    "override", ["run.seed=7", "model.dim=64", "data.seq_len=16", "optim.kind=sgd"]
)
def test_what_a_run_keeps_is_refused_by_its_key(tmp_path: Path, override: str) -> None:
    with pytest.raises(
        JobError,
        match=rf"{override.partition('=')[0]}: a resumed run keeps what it was trained with",
    ):
        load_resumed_job(run_at(tmp_path), [override])


def test_before_the_first_checkpoint_the_optimizer_is_free(tmp_path: Path) -> None:
    assert load_resumed_job(run_at(tmp_path, step=0), ["optim.kind=sgd"]).changes


@pytest.mark.parametrize(
    ("own", "asked", "named"),
    [
        (
            ("parallel.ranks=2", "parallel.dp_shard=2"),
            ("parallel.ranks=1",),
            ["parallel.dp_shard=1"],
        ),
        (
            ("parallel.ranks=4", "parallel.dp_shard=2", "parallel.tp=2"),
            ("parallel.ranks=2", "parallel.tp=2"),
            ["parallel.dp_shard=1"],
        ),
        (
            ("parallel.ranks=4", "parallel.pp=2", "parallel.tp=2"),
            ("parallel.ranks=1",),
            ["parallel.pp=1"],
        ),
        (
            ("parallel.ranks=4", "parallel.dp_replicate=2", "parallel.dp_shard=2"),
            ("parallel.ranks=2",),
            ["parallel."],
        ),
        (
            ("parallel.ranks=2", "parallel.pp=2", "parallel.schedule=zb-v"),
            ("parallel.ranks=1",),
            ["parallel.pp=1", "parallel.schedule=none"],
        ),
        (
            ("parallel.ranks=2", "parallel.dp_shard=2", "parallel.zero_stage=1"),
            ("parallel.ranks=1",),
            ["parallel."],
        ),
    ],
)
def test_ranks_that_do_not_fit_the_runs_layout_are_told_the_overrides_that_do(
    tmp_path: Path, own: tuple[str, ...], asked: tuple[str, ...], named: list[str]
) -> None:
    """The whole set: given as it is told, it resumes."""
    run = run_at(tmp_path, *own)
    with pytest.raises((LayoutError, JobError)) as caught:
        load_resumed_job(run, asked)
    said = str(caught.value)
    for text in named:
        assert text in said
    told = re.findall(r"parallel\.\w+=\S+", said.partition("say what becomes of it, ")[2])
    assert set(asked) <= set(told)
    assert load_resumed_job(run, told).job.parallel.ranks == int(asked[0].partition("=")[2])


def test_a_layout_that_nothing_makes_fit_keeps_its_own_words(tmp_path: Path) -> None:
    with pytest.raises((LayoutError, JobError), match="7 ranks") as caught:
        load_resumed_job(run_at(tmp_path, "parallel.ranks=2"), ["parallel.ranks=7"])
    assert "say what becomes of it" not in str(caught.value)
