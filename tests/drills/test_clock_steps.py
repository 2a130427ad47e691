"""The wall clock of every process of a run is stepped by a day and back by an hour: nothing of
the run notices."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from commands import COLD, TINY, environment, events, loss_curve, run, start, watching, write_text
from phalanx.drills.stepped_clock import SteppedClock
from phalanx.observe.events import RestartScheduled, StepFinished

JOB = (
    *TINY,
    "data.source=text",
    "parallel.ranks=2",
    "train.steps=90",
    "checkpoint.every_steps=15",
    # Saved before the kill five steps later, however busy the disk is.
    "checkpoint.asynchronous=false",
    "run.dir=run",
)
DAY_S = 86400.0


@pytest.mark.long
def test_a_run_whose_clocks_are_stepped_ends_as_any_other(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip(
            "needs a C compiler, for what steps the clocks of the run's processes and of no others"
        )
    clock = SteppedClock.build(tmp_path)
    write_text(tmp_path / "text")
    env = environment(**clock.environment)
    job = (*JOB, 'resilience.inject=["kill:rank=1,step=50"]', "observe.log_every=5")
    with watching(start("train", *job, cwd=tmp_path, env=env, command=COLD)) as watched:
        watched.wait_for("step 10/")
        clock.step_to(DAY_S)
        watched.wait_for("step 35/")
        clock.step_to(-3600)  # rank 1 is killed at an earlier time than most of the run was
        watched.wait_for("step 65/")
        clock.step_to(4 * DAY_S)
        done = watched.finish()
    assert done.code == 0, done.err
    assert re.search(r"^saved +.*step-90", done.out, re.MULTILINE), done.out
    run_dir = tmp_path / "run"
    assert [
        e.event.from_step
        for e in events(run_dir, RestartScheduled)
        if isinstance(e.event, RestartScheduled)
    ] == [45]
    steps = [e.time_unix_s for e in events(run_dir, StepFinished)]
    assert max(steps) - min(steps) > 3 * DAY_S  # the clocks were stepped
    assert list(loss_curve(run_dir)) == list(range(1, 91))
    told = json.loads(run("report", "run", "--json", cwd=tmp_path).out)
    assert told["status"] == "finished"
    assert 0 < told["wall_s"] < done.wall_s + 60
