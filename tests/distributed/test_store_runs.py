"""A run whose checkpoints are in an object store: a real S3 server on loopback, which fails now
and then."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

from commands import (
    TINY,
    Done,
    environment,
    events,
    finish,
    loss_curve,
    run,
    start,
    wait_until,
    watching,
    write_text,
)
from phalanx.checkpoint.stores import open_store_of_run
from phalanx.cli._app import run_command_line as phalanx
from phalanx.observe.events import CheckpointFailed, CheckpointSaved, Note, RunStarted, StepFinished
from phalanx.report.reduce import collect_run_facts
from phalanx.report.summary import build_run_json
from s3_server import BUCKET, CREDENTIALS, Server, s3_server

URL = f"s3://{BUCKET}/run one"
JOB = (
    *TINY,
    "data.source=text",
    "parallel.ranks=2",
    "train.steps=20",
    "checkpoint.every_steps=5",
    "checkpoint.asynchronous=false",
    f"checkpoint.url={URL}",
    "eval.tokens=256",
    "eval.every_steps=20",
    "eval.keep_best=true",
)


@dataclass(frozen=True)
class Story:
    """A run with an outage in its middle, the same run continued, and what the verbs say of its
    store.

    `held`: requests that the store does not answer, and steps that were saved, when the continued
    run had done step 28 and the save of step 25 stood still.
    """

    folder: Path
    server: Server
    first: Done
    resumed: Done
    held: tuple[int, list[int]]

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return start(*arguments, cwd=self.folder, env=environment(**self.server.env))

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
        server.fail(times=1, method="PUT", part="step-25-", holds=True)
        more = ("train.steps=30", "checkpoint.asynchronous=true")
        process = start("train", "--resume", "run", *more, cwd=folder, env=env)
        run_dir = folder / "run"
        try:
            wait_until(
                lambda: (
                    process.poll() is not None
                    or (server.num_failed() and max(loss_curve(run_dir)) >= 28)
                )
            )
            held = server.num_failed(), saved_steps(run_dir)
        finally:
            server.fail(times=0)
            resumed = finish(process)
        yield Story(folder, server, first, resumed, held)


def saved_steps(run_dir: Path) -> list[int]:
    """In order, also while the run is at work."""
    lines = [
        line for path in (run_dir / "events").iterdir() for line in path.read_text().splitlines()
    ]
    return sorted(
        json.loads(line)["step"]
        for line in lines
        if '"event":"checkpoint_saved"' in line.replace(" ", "")
    )


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
    assert steps == set(range(1, 31))


def test_the_run_continues_from_the_store(story: Story) -> None:
    assert (story.resumed.code, story.resumed.err) == (0, "")
    started = [e.event for e in events(story.run_dir) if isinstance(e.event, RunStarted)]
    assert [event.step for event in started] == [0, 20]
    assert started[1].restored_from.startswith("step-20-")
    assert not (story.run_dir / "checkpoints").exists()


def test_training_goes_on_while_the_store_does_not_answer(story: Story) -> None:
    """Steps are done that come after the one that is being saved; its checkpoint is there when
    the store answers."""
    num_requests, saved = story.held
    assert num_requests == 1
    assert saved[-1] == 20
    assert saved_steps(story.run_dir)[-2:] == [25, 30]


def test_the_verbs_work_on_the_run_and_on_the_url(
    story: Story, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: they are many."""
    monkeypatch.chdir(story.folder)
    in_this_process(story.server, monkeypatch)

    def facts(*arguments: str) -> tuple[int, Any]:
        code = phalanx(["checkpoint", *arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    for place in ("run", URL):
        code, listed = facts("ls", place)
        assert code == 0
        steps = [checkpoint["step"] for checkpoint in listed["checkpoints"]]
        assert steps == sorted(steps)
        assert steps[-1] == 30
        assert [checkpoint["epoch"] for checkpoint in listed["checkpoints"]] == [
            1 + (step > 20) for step in steps
        ]
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


def in_this_process(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that are opened here are on `server`."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class(
        "s3"
    ).clear_instance_cache()  # other tests of this process had another server


def test_the_facts_of_a_run_need_no_store(story: Story) -> None:
    """What a laptop without the run's credentials sees."""
    said = build_run_json(collect_run_facts(story.run_dir))["checkpoints"]
    assert [checkpoint["step"] for checkpoint in said][-1] == 30
    assert all(
        checkpoint["path"].startswith(f"{URL}/step-") and checkpoint["num_bytes"] > 0
        for checkpoint in said
    )


def test_a_new_run_does_not_take_the_checkpoints_of_another(story: Story) -> None:
    done = story.phalanx("train", *JOB, "run.dir=other")
    assert done.code == 2
    assert "there are checkpoints of another run" in done.problem
    assert not (story.folder / "other").exists()


SHORT = (*TINY, "data.source=text", "train.steps=4", f"checkpoint.url=s3://{BUCKET}/raced")


@pytest.mark.long
def test_of_two_runs_that_race_for_a_url_one_is_refused(story: Story) -> None:
    """Both have looked and seen nobody's; the store hears of one's claim while the other's is on
    its way."""
    server, names = story.server, ("one", "two")
    server.fail(times=1, method="PUT", part="owner.json", holds=True)
    racing = {name: story.start("train", *SHORT, f"run.dir={name}") for name in names}
    try:
        begun = [story.folder / name / "job.json" for name in names]
        wait_until(lambda: any(path.exists() for path in begun) and server.num_failed() == 1)
    finally:
        server.fail(times=0)
    done = {name: finish(process) for name, process in racing.items()}
    assert sorted(one.code for one in done.values()) == [0, 9]
    winner, loser = sorted(names, key=lambda name: done[name].code)
    assert (
        f"s3://{BUCKET}/raced: checkpoint.url belongs to the run '{winner}' of "
        in done[loser].problem
    )
    assert not (story.folder / loser).exists()
    assert saved_steps(story.folder / winner) == [4]


@pytest.mark.long
def test_a_claim_that_was_lost_is_noticed_before_anything_is_loaded(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second took the URL when the first had claimed it, and its ranks had not begun."""
    in_this_process(story.server, monkeypatch)
    server, url = story.server, f"s3://{BUCKET}/taken"
    job = (*SHORT, f"checkpoint.url={url}")
    first = story.start("train", *job, "run.dir=first")
    try:
        wait_until(
            lambda: first.poll() is not None or (story.folder / "first" / "job.json").exists()
        )
        server.fail(times=1, method="GET", part="owner.json", holds=True)
        wait_until(lambda: first.poll() is not None or server.num_failed() == 1)
        owner = open_store_of_run(story.folder, url).owner
        assert owner is not None
        owner.remove()  # as if the second had looked before the first wrote
        second = story.phalanx("train", *job, "run.dir=second")
    finally:
        server.fail(times=0)
    assert second.code == 0
    done = finish(first)
    assert done.code == 9
    assert "belongs to the run 'second' of " in done.problem
    assert not (story.folder / "first").exists()
    copied = story.folder / "copied"
    shutil.copytree(story.folder / "second", copied)
    (copied / "checkpoint-owner.json").unlink()  # it is not that run any more
    refused = story.phalanx("train", "--resume", "copied", "train.steps=6")
    assert (refused.code, "belongs to the run 'second' of " in refused.problem) == (9, True)
    assert saved_steps(story.folder / "second") == [4]


@pytest.mark.long
def test_a_store_that_takes_the_right_away_while_it_trains(story: Story) -> None:
    """It is asked once for each save, because asking again cannot help; training goes on until
    the last one."""
    job = (
        *SHORT,
        f"checkpoint.url=s3://{BUCKET}/forbidden",
        "train.steps=40",
        "checkpoint.every_steps=8",
    )
    process = story.start("train", *job, "run.dir=forbidden", "checkpoint.asynchronous=false")
    with watching(process) as watched:
        watched.wait_for("saved checkpoint")
        story.server.fail(times=10**6, method="PUT", part="step-", status=403, code="AccessDenied")
        done = watched.finish()
    story.server.fail(times=0)
    assert done.code == 7, done.err
    assert len(done.err.splitlines()) == 1
    assert "PermissionError" in done.err
    assert "the credentials in the environment" in done.err
    assert "starting again" not in done.out
    assert "tried again" not in done.out
    failed = [line for line in done.out.splitlines() if line.startswith("checkpoint of step")]
    assert failed[0].endswith("training goes on, and tries again later")
    assert "training goes on" not in failed[-1]
    assert saved_steps(story.folder / "forbidden") == [8]


def test_what_cannot_be_written_is_said_before_anything_starts(story: Story) -> None:
    done = story.phalanx("train", *JOB, "run.dir=other", "checkpoint.url=s3://no-such-bucket/run")
    assert done.code == 7
    assert "bucket does not exist" in done.problem
    assert not (story.folder / "other").exists()


def test_no_credential_is_in_any_file(story: Story) -> None:
    secret = CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode()
    assert not [
        path for path in story.run_dir.rglob("*") if path.is_file() and secret in path.read_bytes()
    ]
    done = story.phalanx(
        "train", *JOB, "run.dir=other", f"checkpoint.url=s3://id:{secret.decode()}@{BUCKET}/run"
    )
    assert done.code == 3
    assert secret.decode() not in done.err
    assert not (story.folder / "other").exists()


NO_STORES = {
    "bucket/run": "is not a URL",
    "/absolute": "is not a URL",
    "s3:/one": "is not a URL",
    "file://relative": "is not an absolute path",
    "memory://run": "is memory of one process",
    "simplecache::s3://bucket/run": "is a chain of URLs",
    "reference://x": "is of no store",
}


@pytest.mark.parametrize("url", list(NO_STORES))
def test_what_is_no_url_of_a_store_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert phalanx(["plan", *TINY, f"checkpoint.url={url}"]) == 3
    said = capsys.readouterr().err
    assert f"checkpoint.url: '{url}' {NO_STORES[url]}" in said
    assert len(said.splitlines()) == 1
    if "::" in url or "reference" in url:
        assert phalanx(["plan", *TINY, f"model.init_from={url}"]) == 3
        assert f"model.init_from: '{url}' {NO_STORES[url]}" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_whose_store_is_taken_while_it_trains_stops_and_says_whose_it_is(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No further save could be committed.

    The directory is still the run's, and has the end in it.
    """
    in_this_process(story.server, monkeypatch)
    url = f"s3://{BUCKET}/moved"
    job = (
        *TINY,
        "data.source=text",
        "train.steps=1000000",
        "checkpoint.every_steps=4",
        f"checkpoint.url={url}",
    )
    with watching(story.start("train", *job, "parallel.ranks=2", "run.dir=moved")) as watched:
        watched.wait_for("saved checkpoint of step")
        owner = open_store_of_run(story.folder, url).owner
        assert owner is not None
        theirs = json.loads(owner.read() or b"") | {"run_id": "0" * 32, "run": "thief"}
        owner.remove()
        owner.write(json.dumps(theirs).encode())
        done = watched.finish()
    assert done.code == 9, done.err
    assert "belongs to the run 'thief' of " in done.err
    told = json.loads(story.phalanx("report", "moved", "--json").out)
    assert (told["status"], told["exit_code"]) == ("failed", 9)
