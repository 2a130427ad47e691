"""The short copy of a job that measurements train: one that `phalanx train` takes, whatever the job
says, and that disturbs nothing of the job's own run."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.job.copies import list_short_copy_keys, make_short_copy
from phalanx.job.learning_rate import count_warmup_steps
from phalanx.job.load import check_job, load_job
from phalanx.job.schema import Job

ROOT = Path(__file__).parents[2]
README_SAMPLE = (ROOT / "README.md").read_text(encoding="utf-8").split("```toml\n")[1]
EXAMPLES = sorted((ROOT / "examples").rglob("*.toml"))
SAVES_BY_ITSELF = ["checkpoint.every=auto", "checkpoint.mtbf_hours=10"]
# What no cut of train.steps alone leaves legal.
LONG_JOBS = {
    "long warm-up": ["optim.warmup_steps=300"],
    "decay": ["optim.schedule=wsd", "optim.warmup_steps=17"],
    "almost all is decay": ["train.steps=5000", "optim.schedule=wsd", "optim.decay_fraction=0.98"],
    "all is decay": ["optim.schedule=wsd", "optim.decay_fraction=1.0", "optim.warmup_steps=0"],
    "saves by itself": SAVES_BY_ITSELF,
    "keeps some": [*SAVES_BY_ITSELF, "checkpoint.keep_last=2", "checkpoint.keep_every=100"],
    "traces": ['observe.trace_steps=["200:203"]', "observe.profile_steps=[300]"],
    "faults": ['resilience.inject=["kill:rank=0,step=7", "preempt:rank=0,step=99"]'],
    "keeps the best": ["eval.every_steps=50", "eval.keep_best=true"],
    "speaks": [
        'observe.sinks=["tensorboard"]',
        "observe.metrics_port=9100",
        "observe.alert_webhook=$ALERTS",
        'observe.alert_command=["mail", "me"]',
    ],
    "writes elsewhere": ["checkpoint.url=s3://bucket/run-7"],
}


@pytest.mark.parametrize("num_steps", [8, 20, 40])
def test_short_copies_of_the_examples_and_of_the_readme_are_jobs(
    num_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "readme.toml").write_text(README_SAMPLE.split("```")[0], encoding="utf-8")
    assert len(EXAMPLES) >= 2
    for file in (*EXAMPLES, tmp_path / "readme.toml"):
        # Modules of examples are beside their job.
        monkeypatch.chdir(file.parent)
        assert check_job(make_short_copy(load_job(file.name), num_steps)).train.steps == num_steps


@pytest.mark.parametrize("num_steps", [1, 8, 20, 40, 1000])
@pytest.mark.parametrize("name", LONG_JOBS)
def test_short_copies_are_jobs_whatever_the_job_says(name: str, num_steps: int) -> None:
    job = load_job(None, LONG_JOBS[name])
    short = check_job(make_short_copy(job, num_steps))
    assert short.train.steps == num_steps
    assert count_warmup_steps(short) <= count_warmup_steps(job)


def test_short_copies_do_nothing_but_steps() -> None:
    job = load_job(None, sum(LONG_JOBS.values(), ["parallel.tp=2", "run.seed=7"]))
    short = make_short_copy(job, 20)
    assert (short.parallel, short.run, short.data) == (job.parallel, job.run, job.data)
    assert not short.checkpoint.has_interval
    assert not short.checkpoint.at_end
    assert short.checkpoint.url is None
    assert not short.observe.has_observer
    assert short.observe.sinks == ()
    assert not short.observe.trace_steps
    assert not short.observe.profile_steps
    assert not short.eval.tokens
    assert not short.resilience.inject


def test_short_copies_warm_up_as_slowly_as_they_can() -> None:
    """The peak right at the start would meet weights that no step has moved."""
    assert count_warmup_steps(Job()) == 50
    warmups = [list_short_copy_keys(Job(), steps)["optim.warmup_steps"] for steps in (8, 40, 80)]
    assert warmups == [8, 40, 50]
