"""Asked to stop: the run saves, says how to continue, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import (
    COLD,
    TINY,
    Done,
    environment,
    events,
    loss_curve,
    run,
    start,
    survivors,
    wait_until,
    watching,
    weights,
    write_text,
)
from holds import holding
from phalanx.observe.events import (
    CheckpointPostponed,
    CheckpointSaved,
    RunFinished,
    StepFinished,
    StepSkipped,
    StopRequested,
)

STEPS = 100
JOB = (*TINY, "data.source=text", f"train.steps={STEPS}", "parallel.ranks=2", "observe.log_every=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signals")
    write_text(folder / "text")
    done = run("train", *JOB, "run.dir=straight", cwd=folder)
    assert done.code == 0, done.err
    return folder


@pytest.fixture(autouse=True)
def _nothing_is_left(folder: Path) -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    wait_until(lambda: not survivors(folder))
    left = {
        name
        for name in set(os.listdir("/dev/shm")) - before
        if "torch" in name or "phalanx" in name
    }
    # Files of other tests that run beside these have a name for a moment.
    wait_until(lambda: left.isdisjoint(os.listdir("/dev/shm")))
    assert not list(folder.glob("*/lock"))


def test_sigterm_saves_and_the_resumed_run_is_the_same(folder: Path) -> None:
    held = holding(folder, "until_stop", STEPS - 10)
    process = start("train", *JOB, *held, "run.dir=preempted", cwd=folder)
    with watching(process) as watched:
        watched.wait_for("step 5/")
        process.send_signal(signal.SIGTERM)
        stopped = watched.finish()
    assert stopped.code == 75, stopped.err
    run_dir = folder / "preempted"
    (step,) = {e.event.step for e in events(run_dir, StopRequested)}
    assert [e.event.step for e in events(run_dir, CheckpointSaved)] == [step]
    assert (
        f"resume  phalanx train --resume preempted   (newest checkpoint: step-{step})"
        in stopped.out
    )
    (ended,) = (e.event for e in events(run_dir, RunFinished))
    assert (ended.status, ended.exit_code, ended.step) == ("preempted", 75, step)
    shorter = (f"train.steps={step - 1}", "resilience.inject=[]")
    refused = run("train", "--resume", "preempted", *shorter, cwd=folder)
    assert refused.code == 2
    assert (
        f"train.steps is {step - 1}, and step {step} is done and saved; set train.steps to more"
        in refused.problem
    )
    done = run("train", "--resume", "preempted", cwd=folder)
    assert done.code == 0, done.err
    assert loss_curve(run_dir) == loss_curve(folder / "straight")
    assert weights(run_dir) == weights(folder / "straight")
    assert len(events(run_dir, StepFinished)) == 2 * STEPS  # no step was done twice


GRABBING = """
import signal
from phalanx.nn.objective import causal_cross_entropy
signal.signal(signal.SIGTERM, lambda number, frame: print("mine"))
loss = causal_cross_entropy(64)
"""


def test_a_handler_of_the_users_module_does_not_keep_a_stop_from_the_ranks(folder: Path) -> None:
    (folder / "grabbing.py").write_text(GRABBING)
    faults = 'resilience.inject=["preempt:rank=0,step=5,phase=data"]'
    done = run(
        *("train", *JOB, "model.objective=grabbing:loss", faults, "run.dir=grabbed"), cwd=folder
    )
    assert done.code == 75, done.out + done.err
    (step,) = {e.event.step for e in events(folder / "grabbed", StopRequested)}
    assert done.err == f"stopped by SIGTERM; the checkpoint of step {step} stands\n"
    assert "code of yours handles SIGTERM" in done.out


@pytest.mark.long
def test_a_stop_while_a_save_is_in_flight(folder: Path) -> None:
    """Saves beside training all the time: the one in flight ends, the stop's own comes after it,
    nothing is lost."""
    held = holding(folder, "until_stop", STEPS - 10)
    process = start(
        *("train", *JOB, *held, "run.dir=in flight", "checkpoint.every_minutes=0.00001"),
        cwd=folder,
    )
    stopped = _stopped(process, "is still being written")
    assert stopped.code == 75, stopped.err
    run_dir = folder / "in flight"
    (step,) = {e.event.step for e in events(run_dir, StopRequested)}
    saved = [e.event for e in events(run_dir, CheckpointSaved)]
    assert saved[-1].step == step
    assert all(event.stall_s < event.wall_s for event in saved[:-1])
    postponed = [e.event for e in events(run_dir, CheckpointPostponed)]
    assert postponed
    assert all(event.saving_step < event.step for event in postponed)
    assert {event.saving_step for event in postponed} <= {event.step for event in saved}
    done = run("train", "--resume", "in flight", cwd=folder)
    assert done.code == 0, done.err
    assert loss_curve(run_dir) == loss_curve(folder / "straight")
    assert weights(run_dir) == weights(folder / "straight")
    assert len(events(run_dir, StepFinished)) == 2 * STEPS  # no step was done twice


@pytest.mark.long
@pytest.mark.parametrize(
    "phase", ["ckpt_write", pytest.param("before_commit", marks=pytest.mark.long)]
)
def test_a_grace_period_too_short_leaves_the_checkpoint_before(folder: Path, phase: str) -> None:
    """The save of the stop stands still (a disk that does not answer): it is killed, and the one
    before stands."""
    shutil.copy(Path(__file__).parents[1] / "distributed" / "user_code.py", folder)
    name = f"no time {phase}"
    run_dir = folder / name
    held = holding(folder, "until_stop", STEPS - 10)
    first = _stopped(start("train", *JOB, *held, f"run.dir={name}", cwd=folder), "step 5/")
    assert first.code == 75, first.err
    (step,) = {e.event.step for e in events(run_dir, StopRequested)}
    before = weights(run_dir)
    limits = (
        "resilience.grace_s=1",
        f'resilience.inject=["user_code:stand_still:rank=0,phase={phase}"]',
    )
    done = _stopped(start("train", "--resume", name, *limits, cwd=folder), f"step {step + 5}/")
    assert done.code == 75, done.err
    assert (
        f"did not save within the grace period and were killed; the checkpoint of step {step} stands"
        in done.err
    )
    assert f"newest checkpoint: step-{step})" in done.out
    assert weights(run_dir) == before
    done = run("train", "--resume", name, cwd=folder)
    assert done.code == 0, done.err
    assert loss_curve(run_dir) == loss_curve(folder / "straight")
    assert weights(run_dir) == weights(folder / "straight")
    assert set(os.listdir(run_dir / "checkpoints")) == {f"step-{step}", f"step-{STEPS}"}


def _stopped(process: subprocess.Popen[str], words: str) -> Done:
    """The end of a command that gets SIGTERM as soon as it says `words`."""
    with watching(process) as watched:
        watched.wait_for(words)
        process.send_signal(signal.SIGTERM)
        return watched.finish()


def test_ctrl_c_saves_and_says_how_to_continue(folder: Path) -> None:
    """The whole foreground group gets it, as from a terminal; checkpoints by the clock were
    written meanwhile."""
    process = start(
        *("train", *JOB, "train.steps=1000000", "run.dir=interrupted"),
        "checkpoint.every_minutes=0.0001",
        cwd=folder,
    )
    with watching(process) as watched:
        watched.wait_for("saved checkpoint of step")
        watched.wait_for("saved checkpoint of step")
        os.killpg(process.pid, signal.SIGINT)
        watched.wait_for("stopping after this step and saving; press Ctrl-C again to stop at once")
        resume = watched.wait_for("resume  phalanx train --resume interrupted")
        done = watched.finish()
    assert done.code == 130, done.err
    run_dir = folder / "interrupted"
    (step,) = {e.event.step for e in events(run_dir, StopRequested)}
    assert f"step-{step})" in resume
    saved = [e.event.step for e in events(run_dir, CheckpointSaved)]
    assert len(saved) >= 3
    assert saved[-1] == step
    weights(run_dir)
    assert done.out.splitlines()[-1] == "run     interrupted"


def test_ctrl_c_twice_is_at_once(folder: Path) -> None:
    """A model that takes its time in its forward does not keep anybody waiting."""
    shutil.copy(Path(__file__).parents[1] / "distributed" / "user_code.py", folder)
    job = [word for word in JOB if not word.startswith("model.")]  # a factory has its own
    process = start("train", *job, "run.dir=twice", "model.kind=user_code:slow", cwd=folder)
    with watching(process) as watched:
        watched.wait_for("2 ranks on cpu")
        wait_until((folder / "slow").exists)
        os.killpg(process.pid, signal.SIGINT)
        watched.wait_for("press Ctrl-C again to stop at once")
        os.killpg(process.pid, signal.SIGINT)
        done = watched.finish()
        # Neither its forward, of a minute, nor the grace period of a stop was waited for.
        assert done.wall_s < 20.0
    assert done.code == 130
    assert "stopped at once by Ctrl-C; no checkpoint is there" in done.err
    assert "Traceback" not in done.err


@pytest.mark.long
def test_steps_that_are_not_a_number_are_skipped_by_all_ranks(folder: Path) -> None:
    """NaN on one rank at steps 3 and 5: nobody applies them, the run says which samples, and it
    goes on."""
    shutil.copy(Path(__file__).parents[1] / "distributed" / "user_code.py", folder)
    mine = ["model.objective=user_code:poisoned", "train.steps=8", "parallel.ranks=2"]
    # Each step, however short it is, in files of its own, however little has changed.
    saves = (
        "checkpoint.every_steps=1",
        "checkpoint.asynchronous=false",
        "checkpoint.incremental=false",
    )
    job = ["train", *TINY, "data.source=text", *mine, *saves]
    limit = "resilience.max_skipped_steps=2"
    some = start(*job, "run.dir=nan", limit, cwd=folder, env=environment(POISON="3,5"))
    many = start(*job, "run.dir=all nan", limit, cwd=folder, env=environment(POISON="2,3,4,5"))
    out, err = some.communicate()
    assert some.returncode == 0, err
    run_dir = folder / "nan"
    skipped = [e.event for e in events(run_dir, StepSkipped)]
    assert [(e.step, e.reason, e.first_sample, e.num_samples) for e in skipped] == [
        (3, "nonfinite_gradients", 16, 8),
        (5, "nonfinite_gradients", 32, 8),
    ]
    assert "skipped step 3: nonfinite gradients" in out
    for step in (3, 5):
        assert weights(run_dir, step) == weights(run_dir, step - 1)
    for step in (2, 4, 6, 7, 8):
        assert weights(run_dir, step) != weights(run_dir, step - 1)
    out, err = many.communicate()
    assert many.returncode == 8, err
    assert err.splitlines() == [
        "3 steps in a row had non-finite gradients, up to step 4; lower optim.lr, lengthen"
        " optim.warmup_steps, or continue from an older checkpoint"
    ]
    assert [e.event.step for e in events(folder / "all nan", StepSkipped)] == [2, 3]


@pytest.mark.long
@pytest.mark.parametrize("after_s", [0.0, 0.3, 1.0, 1.5, 2.0, 2.5, 3.5])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_at_any_moment_of_the_start(
    folder: Path, after_s: float, number: signal.Signals
) -> None:
    """Whether or not the ranks have started: the agreed exit code, no traceback, nothing left."""
    name = f"early {number.name} {after_s}"
    # So many steps that a run which does not hear of the signal cannot be done before it is
    # noticed.
    process = start(
        "train", *JOB, "train.steps=1000000", f"run.dir={name}", cwd=folder, command=COLD
    )
    with watching(process) as watched:
        watched.wait_for("run     ")
        deadline = time.monotonic() + after_s
        wait_until(lambda: time.monotonic() >= deadline)
        os.killpg(process.pid, number)
        done = watched.finish()
    assert done.code == (75 if number == signal.SIGTERM else 130), done.err
    assert "Traceback" not in done.err
