"""Loader workers of a real run are killed and frozen: it goes on, and its losses are those of a
run without any."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from commands import TINY, events, loss_curve, run, start, survivors, watching, write_text
from phalanx.observe.events import LoaderWorkerReplaced, StepFinished

STEPS = 60


def workers(run_dir: Path) -> list[int]:
    """Pids of the loader workers whose command line or open files name this run's ranks, in
    order of their ranks."""
    found = []
    for process in psutil.process_iter(["cmdline", "ppid"]):
        if "phalanx.data.worker" in (process.info["cmdline"] or []):
            parent = psutil.Process(process.info["ppid"])
            with contextlib.suppress(psutil.Error):  # of others' workers
                if any(str(run_dir.resolve()) in file.path for file in parent.open_files()):
                    found.append((parent.pid, process.pid))
    return [pid for _, pid in sorted(found)]


@pytest.mark.long
def test_killed_and_frozen_workers_change_nothing(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    job = (
        *TINY,
        "data.source=text",
        f"train.steps={STEPS}",
        "parallel.ranks=2",
        "observe.samples=true",
    )
    straight = run("train", *job, "run.dir=straight", cwd=tmp_path)
    assert straight.code == 0, straight.err

    options = (
        "data.workers=1",
        "data.worker_timeout_s=1",
        "observe.log_every=5",
        "run.dir=injured",
    )
    with watching(start("train", *job, *options, cwd=tmp_path)) as injured:
        injured.wait_for("step 5/")
        first, second = workers(tmp_path / "injured")
        os.kill(first, signal.SIGKILL)
        os.kill(second, signal.SIGSTOP)
        done = injured.finish()
    assert done.code == 0, done.err

    replaced = events(tmp_path / "injured", LoaderWorkerReplaced)
    assert {envelope.rank: envelope.event.reason for envelope in replaced} == {
        0: "worker 0 of rank 0 killed by SIGKILL",
        1: "worker 0 of rank 1 silent for 1 s",
    }
    assert "worker 0 of rank 1 silent for 1 s" in done.out
    assert loss_curve(tmp_path / "injured") == loss_curve(tmp_path / "straight")
    assert len(loss_curve(tmp_path / "injured")) == STEPS
    waited = max(
        e.event.phases_s["data"] for e in events(tmp_path / "injured", StepFinished) if e.rank == 1
    )
    assert waited > 0.5  # the wait for the frozen worker is charged to the data
    assert run("data", "ledger", "injured", cwd=tmp_path).code == 0
    assert survivors(tmp_path / "injured") == []
