"""A run whose checkpoints are in an object store: a real S3 server on loopback, which fails now and then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

from commands import TINY, Done, environment, events, run, write_text
from phalanx.cli._app import run as phalanx
from phalanx.observe.events import CheckpointFailed, CheckpointSaved, Note, RunStarted, StepFinished
from phalanx.report.reduce import reduce_run
from phalanx.report.summary import run_json
from s3_server import BUCKET, CREDENTIALS, Server, s3_server

URL = f"s3://{BUCKET}/run one"
JOB = (
    *TINY,
    "data.source=text",
    "parallel.ranks=2",
    "train.steps=30",
    "checkpoint.every_steps=5",
    "checkpoint.asynchronous=false",
    f"checkpoint.url={URL}",
    "eval.tokens=256",
    "eval.every_steps=15",
    "eval.keep_best=true",
)


@dataclass(frozen=True)
class Story:
    """A run with an outage in its middle, the same run continued, and what the verbs say of its store."""

    folder: Path
    server: Server
    first: Done
    resumed: Done

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def phalanx(self, *arguments: str) -> Done:
        return run(*arguments, cwd=self.folder, env=environment(**self.server.env))


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("home")
    write_text(folder / "text")
    with s3_server() as server:
        # The save of step 10 fails for good: four tries of each of two ranks.
        server.fail(times=100, method="PUT", part="step-10-", status=500)
        env = environment(**server.env)
        first = run("train", *JOB, "run.dir=run", cwd=folder, env=env)
        server.fail(times=0)
        more = ("train.steps=40", "checkpoint.asynchronous=true")
        resumed = run("train", "--resume", "run", *more, cwd=folder, env=env)
        yield Story(folder, server, first, resumed)


def test_an_outage_costs_one_checkpoint_and_training_goes_on(story: Story) -> None:
    assert (story.first.code, story.first.err) == (0, "")
    found = events(story.run_dir)
    failed = [e.event for e in found if isinstance(e.event, CheckpointFailed)]
    saved = [e.event.step for e in found if isinstance(e.event, CheckpointSaved)]
    assert [event.step for event in failed] == [10]
    assert "tried 4 times" in failed[0].reason
    assert {5, 20, 25, 30} <= set(saved)
    assert 10 not in saved
    assert any(isinstance(e.event, Note) and e.event.code == "store_is_slow" for e in found)
    steps = {e.event.step for e in found if isinstance(e.event, StepFinished)}
    assert steps == set(range(1, 41))


def test_the_run_continues_from_the_store(story: Story) -> None:
    assert (story.resumed.code, story.resumed.err) == (0, "")
    started = [e.event for e in events(story.run_dir) if isinstance(e.event, RunStarted)]
    assert [event.step for event in started] == [0, 30]
    assert started[1].restored_from.startswith("step-30-")
    assert not (story.run_dir / "checkpoints").exists()


def test_the_verbs_work_on_the_run_and_on_the_url(
    story: Story, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: they are many."""
    monkeypatch.chdir(story.folder)
    for name, value in story.server.env.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # other tests of this process had another server

    def facts(*arguments: str) -> tuple[int, Any]:
        code = phalanx(["checkpoint", *arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    for place in ("run", URL):
        code, listed = facts("ls", place)
        assert code == 0
        steps = [checkpoint["step"] for checkpoint in listed["checkpoints"]]
        assert steps == sorted(steps)
        assert steps[-1] == 40
        assert [checkpoint["epoch"] for checkpoint in listed["checkpoints"]] == [1 + (step > 30) for step in steps]
        code, verified = facts("verify", place)
        assert (code, verified["checkpoints"][0]["ok"]) == (0, True)
    names = [checkpoint["name"] for checkpoint in listed["checkpoints"]]
    one, other = f"{URL}/{names[0]}", f"{URL}/{names[-1]}"
    assert facts("diff", one, one)[0] == 0
    assert facts("diff", one, other)[0] == 11
    best = json.loads((story.run_dir / "best.json").read_text())
    assert best["checkpoint"] in [f"{URL}/{name}" for name in names]
    code, pruned = facts("prune", "run", "--keep-last", "1")
    assert code == 0
    assert best["checkpoint"].rpartition("/")[2] in pruned["kept"]
    assert names[0] in pruned["removed"]
    assert facts("verify", one)[0] == 5


def test_the_facts_of_a_run_need_no_store(story: Story) -> None:
    """What a laptop without the run's credentials sees."""
    said = run_json(reduce_run(story.run_dir))["checkpoints"]
    assert [checkpoint["step"] for checkpoint in said][-1] == 40
    assert all(checkpoint["path"].startswith(f"{URL}/step-") and checkpoint["num_bytes"] > 0 for checkpoint in said)


def test_a_new_run_does_not_take_the_checkpoints_of_another(story: Story) -> None:
    done = story.phalanx("train", *JOB, "run.dir=other")
    assert done.code == 2
    assert "there are checkpoints of another run" in done.problem
    assert not (story.folder / "other").exists()


def test_what_cannot_be_written_is_said_before_anything_starts(story: Story) -> None:
    done = story.phalanx("train", *JOB, "run.dir=other", "checkpoint.url=s3://no-such-bucket/run")
    assert done.code == 5
    assert "bucket does not exist" in done.problem
    assert not (story.folder / "other").exists()


def test_no_credential_is_in_any_file(story: Story) -> None:
    secret = CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode()
    assert not [path for path in story.run_dir.rglob("*") if path.is_file() and secret in path.read_bytes()]
    done = story.phalanx("train", *JOB, "run.dir=other", f"checkpoint.url=s3://id:{secret.decode()}@{BUCKET}/run")
    assert done.code == 3
    assert secret.decode() not in done.err
    assert not (story.folder / "other").exists()


@pytest.mark.parametrize("url", ["bucket/run", "/absolute", "s3:/one"])
def test_what_is_no_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert phalanx(["plan", *TINY, f"checkpoint.url={url}"]) == 3
    assert "checkpoint.url" in capsys.readouterr().err
