"""A job that was taken for dead wakes up when another has its run: it stops, writes nothing, and says who has it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from commands import TINY, run, snapshot, start, wait_until, watching, write_text
from phalanx.checkpoint.manifest import list_checkpoints

JOB = (*TINY, "data.source=text", "parallel.ranks=2", "checkpoint.every_steps=4", "train.steps=1000000")


def family(pid: int, run_dir: Path) -> list[psutil.Process]:
    """The supervisor and all that hold something open below its run: the server, the ranks."""
    found = []
    for process in psutil.process_iter():
        try:
            words, opened = process.cmdline(), [file.path for file in process.open_files()]
        except psutil.Error:
            continue
        if process.pid == pid or any(str(run_dir) in text for text in (*words, *opened)):
            found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def take_over(folder: Path, run_dir: Path) -> int:
    """Another job continues the run, to an end of its own, as if the first one's machine were gone; its exit code."""
    (run_dir / "lock").unlink()
    step = max(int(path.name.removeprefix("step-")) for path in list_checkpoints(run_dir))
    return run("train", "--resume", run_dir.name, f"train.steps={step + 3}", cwd=folder).code


def test_a_job_that_wakes_up_stops_at_once_and_leaves_the_run_as_the_other_left_it(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    run_dir = tmp_path / "run"
    process = start("train", *JOB, "run.dir=run", cwd=tmp_path)
    with watching(process) as watched:
        watched.wait_for("saved checkpoint")
        stopped = family(process.pid, run_dir)
        assert len(stopped) >= 4
        for one in stopped:
            one.suspend()
        try:
            assert take_over(tmp_path, run_dir) == 0
            before = snapshot(run_dir)
        finally:
            for one in stopped:
                one.resume()
        done = watched.finish()
    assert done.code == 9, done.err
    assert "another job has this run: process" in done.err
    assert "--fallback" not in done.out + done.err
    assert len(done.err.splitlines()) == 1
    assert snapshot(run_dir) == before


@pytest.mark.parametrize("who", ["nobody", "ranks"])
def test_a_lock_removed_by_hand_and_taken_by_another_stops_the_first(tmp_path: Path, who: str) -> None:
    """Both live: the first hears of it within seconds, its supervisor even where its ranks stand still."""
    write_text(tmp_path / "text")
    run_dir = tmp_path / "run"
    first = start("train", *JOB, "run.dir=run", cwd=tmp_path)
    with watching(first) as watched:
        watched.wait_for("saved checkpoint")
        ranks = [p for p in family(first.pid, run_dir) if _is_rank(p, run_dir)] if who == "ranks" else []
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


def _is_rank(process: psutil.Process, run_dir: Path) -> bool:
    try:
        return any(str(run_dir / "events" / "rank-") in file.path for file in process.open_files())
    except psutil.Error:
        return False
