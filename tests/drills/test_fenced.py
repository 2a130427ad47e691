"""A job that was taken for dead wakes up when another has its run: it stops, writes nothing, and
says who has it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from commands import (
    DEADLINE_S,
    TINY,
    Done,
    environment,
    nursery,
    run,
    snapshot,
    start,
    wait_until,
    watching,
    write_text,
)
from phalanx.checkpoint.manifest import list_checkpoint_paths_of_run, read_manifest
from phalanx.checkpoint.ownership.fence import FENCE_CHECK_INTERVAL_S
from phalanx.core.black_box_reader import read_last_position
from phalanx.launch.paths import black_box_path
from phalanx.observe.events import CheckpointSaved
from phalanx.observe.tail import read_recorded_events
from s3_server import BUCKET, s3_server

JOB = (
    *TINY,
    "data.source=text",
    "parallel.ranks=2",
    "checkpoint.every_steps=4",
    "train.steps=1000000",
)
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "phalanx",
)


@dataclass(frozen=True)
class LeftFiles:
    """What lies in a run at a moment at which the first job stands still."""

    run_dir: Path
    files: dict[str, tuple[int, int]]
    at_unix_s: float

    @classmethod
    def of_run(cls, run_dir: Path) -> LeftFiles:
        return cls(run_dir, snapshot(run_dir), time.time())

    def list_changed(self) -> list[str]:
        """The files that changed since, but for a line that a process had made when it was stopped,
        between the look at the fence and the write."""
        after = snapshot(self.run_dir)
        return sorted(
            name
            for name in self.files.keys() | after.keys()
            if self.files.get(name) != after.get(name) and not self._has_line_of_before(name)
        )

    def _has_line_of_before(self, name: str) -> bool:
        if not name.startswith("events/") or name not in self.files:
            return False
        new = (self.run_dir / name).read_bytes()[self.files[name][0] :].splitlines()
        return len(new) == 1 and json.loads(new[0])["time_unix_s"] < self.at_unix_s


def family(pid: int, run_dir: Path) -> list[psutil.Process]:
    """The supervisor, all that hold something open below its run (two ranks), and who forked
    these: the server."""
    deadline = time.monotonic() + DEADLINE_S
    while len(found := _family(pid, run_dir)) < 4:  # not all of them have started
        assert time.monotonic() < deadline, found
    return found


def _family(pid: int, run_dir: Path) -> list[psutil.Process]:
    found = {pid}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(
                str(run_dir) in text
                for text in (*process.cmdline(), *(f.path for f in process.open_files()))
            ):
                found |= {process.pid, process.ppid()}
    return [
        psutil.Process(pid) for pid in found - {os.getpid(), nursery().pid, nursery("commands").pid}
    ]


def take_over(folder: Path, run_dir: Path, env: dict[str, str] | None = None) -> int:
    """Another job continues the run, to an end of its own, as if the first one's machine were
    gone; its exit code."""
    (run_dir / "lock").unlink()
    told = [envelope.event for envelope in read_recorded_events(run_dir, CheckpointSaved)]
    steps = [event.step for event in told if isinstance(event, CheckpointSaved)]
    # The newest may have been stopped before they were told.
    steps += [read_manifest(path).step for path in list_checkpoint_paths_of_run(run_dir)]
    later, since = max(steps) + 11, time.monotonic()
    done = run("train", "--resume", run_dir.name, f"train.steps={later}", cwd=folder, env=env)
    print(done.err)
    wait_until(
        lambda: time.monotonic() - since > FENCE_CHECK_INTERVAL_S
    )  # who was stopped for longer looks before all else
    return done.code


def test_a_job_that_wakes_up_stops_at_once_and_leaves_the_run_as_the_other_left_it(
    tmp_path: Path,
) -> None:
    write_text(tmp_path / "text")
    run_dir = tmp_path / "run"
    process = start("train", *JOB, "run.dir=run", cwd=tmp_path)
    with watching(process) as watched:
        watched.wait_for("saved checkpoint")
        stopped = family(process.pid, run_dir)
        for one in stopped:
            one.suspend()
        try:
            assert take_over(tmp_path, run_dir) == 0
            before = LeftFiles.of_run(run_dir)
        finally:
            for one in stopped:
                one.resume()
        done = watched.finish()
    assert done.code == 9, done.err
    assert "another job has this run: process" in done.err
    assert "--fallback" not in done.out + done.err
    assert len(done.err.splitlines()) == 1
    # A write of its own that was under way when it was stopped ends when it wakes up, in a save that
    # is never committed.
    assert [name for name in before.list_changed() if ".partial/" not in name] == []


@pytest.mark.parametrize("who", ["nobody", pytest.param("ranks", marks=pytest.mark.long)])
def test_a_lock_removed_by_hand_and_taken_by_another_stops_the_first(
    tmp_path: Path, who: str
) -> None:
    """Both live: the first hears of it within seconds, its supervisor even where its ranks stand
    still."""
    write_text(tmp_path / "text")
    run_dir = tmp_path / "run"
    first = start("train", *JOB, "run.dir=run", cwd=tmp_path)
    with watching(first) as watched:
        watched.wait_for("saved checkpoint")
        ranks = (
            [p for p in family(first.pid, run_dir) if _is_rank(p, run_dir)]
            if who == "ranks"
            else []
        )
        for one in ranks:
            one.send_signal(signal.SIGSTOP)
        (run_dir / "lock").unlink()
        second = start("train", "--resume", "run", cwd=tmp_path)
        with watching(second) as other:
            other.wait_for("continues at step")
            done = watched.finish()
            assert done.code == 9, done.err
            assert f"another job has this run: process {second.pid} on" in done.err
            wait_until(lambda: not any(one.is_running() for one in ranks))
            after = time.time()
            second.send_signal(signal.SIGINT)
            assert other.finish().code == 130
    theirs = [path for path in run_dir.rglob("*attempt-00*") if path.stat().st_mtime > after]
    assert theirs == []


@pytest.mark.long
def test_a_run_directory_that_is_removed_ends_the_run_before_the_next_save(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    run_dir = tmp_path / "run"
    changes = ("checkpoint.every_steps=1000000", "observe.log_every=1")
    with watching(start("train", *JOB, *changes, "run.dir=run", cwd=tmp_path)) as watched:
        watched.wait_for("step 3/")
        shutil.rmtree(run_dir, ignore_errors=True)
        done = watched.finish()
    assert done.code == 7, done.err
    assert "was removed or moved while the run trained" in done.err
    assert "another job" not in done.err
    assert len(done.err.splitlines()) == 1
    assert not run_dir.exists()


@pytest.mark.long
def test_a_job_that_stood_still_in_an_evaluation_names_no_best_and_writes_nothing(
    tmp_path: Path,
) -> None:
    write_text(tmp_path / "text")
    run_dir = tmp_path / "run"
    evals = (
        "eval.tokens=3000",
        "eval.every_steps=2",
        "eval.keep_best=true",
        "data.held_out_fraction=0.2",
    )
    process = start("train", *JOB, *evals, "run.dir=run", cwd=tmp_path)
    with watching(process) as watched:
        watched.wait_for("saved checkpoint")
        stopped = suspend_when(process.pid, run_dir, lambda: _phase(run_dir) == "evaluate")
        before = taken_over(stopped, tmp_path, run_dir)
        require_fenced(watched.finish(), before)


@pytest.mark.long
def test_a_job_that_stood_still_while_its_save_was_in_flight_commits_nothing(
    tmp_path: Path,
) -> None:
    write_text(tmp_path / "text")
    run_dir = tmp_path / "run"
    with s3_server() as server:
        env = environment(**server.env)
        job = (*JOB, f"checkpoint.url=s3://{BUCKET}/run", "checkpoint.asynchronous=true")
        process = start("train", *job, "run.dir=run", cwd=tmp_path, env=env)
        with watching(process) as watched:
            watched.wait_for("saved checkpoint")
            server.fail(times=1, method="PUT", part="step-", holds=True)
            wait_until(lambda: server.num_failed() == 1)
            stopped = suspend_when(process.pid, run_dir, lambda: True)
            found: list[str] = []

            def awake() -> None:
                found.append(run("checkpoint", "ls", "run", "--json", cwd=tmp_path, env=env).out)
                server.fail(times=0)

            before = taken_over(stopped, tmp_path, run_dir, env, awake)
            require_fenced(watched.finish(), before)
        assert run("checkpoint", "ls", "run", "--json", cwd=tmp_path, env=env).out == found[0]
    assert len(json.loads(found[0])["checkpoints"]) >= 2


@pytest.mark.long
def test_a_job_of_another_launcher_that_stood_still_is_fenced(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    run_dir = tmp_path / "run"
    process = start("train", *JOB, f"run.dir={run_dir}", cwd=tmp_path, command=TORCHRUN)
    with watching(process) as watched:
        watched.wait_for("saved checkpoint")
        stopped = suspend_when(process.pid, run_dir, lambda: True)
        before = taken_over(stopped, tmp_path, run_dir)
        done = watched.finish()
    assert before.list_changed() == []
    assert done.err.count("another job has this run: process") == 1, done.err
    assert "exitcode  : 9" in done.err  # torchrun's own is 1, whatever its ranks' are


def suspend_when(pid: int, run_dir: Path, is_there: Callable[[], bool]) -> list[psutil.Process]:
    """Stop all processes of a job at a moment at which `is_there` is true of them."""
    for _ in range(2000):
        stopped = family(pid, run_dir)
        assert len(stopped) >= 3
        for one in stopped:
            one.suspend()
        if is_there():
            return stopped
        for one in stopped:
            one.resume()
        time.sleep(0.01)  # not to wait for anything: the job is to get somewhere else
    raise AssertionError("the job was never there")


def taken_over(
    stopped: list[psutil.Process],
    folder: Path,
    run_dir: Path,
    env: dict[str, str] | None = None,
    awake: Callable[[], None] = lambda: None,
) -> LeftFiles:
    """Have another job continue the run to an end, then the first one wake up; what the other
    left."""
    try:
        assert take_over(folder, run_dir, env) == 0
        before = LeftFiles.of_run(run_dir)
    finally:
        for one in stopped:
            one.resume()
        awake()
    return before


def require_fenced(done: Done, before: LeftFiles) -> None:
    assert done.code == 9, done.err
    assert "another job has this run: process" in done.err
    assert len(done.err.splitlines()) == 1
    assert before.list_changed() == []


def _phase(run_dir: Path) -> str:
    place = read_last_position(black_box_path(run_dir, 0))
    return place.phase if place is not None else ""


def _is_rank(process: psutil.Process, run_dir: Path) -> bool:
    try:
        return any(str(run_dir / "events" / "rank-") in file.path for file in process.open_files())
    except psutil.Error:
        return False
