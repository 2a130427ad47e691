"""Code of the user's that leaves before the last step, from the command line: a crash, whatever
its exit code says."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from commands import TINY, Done, environment, events, finish, run, start, write_text
from phalanx.observe.events import RankFailed, RunFinished

STEPS = 16
JOB = (
    *(key for key in TINY if not key.startswith(("model.", "train.global_batch_size"))),
    "train.global_batch_size=2",
    "data.source=text",
    f"train.steps={STEPS}",
    "model.kind=user_code:bigram",
    "model.objective=user_code_leaving:objective",
    "parallel.ranks=2",
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

LONG_WAYS, THEIR_LONG_WAYS = ("sys.exit 0", "C 75"), ("sys.exit 0", "interrupt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exits")
    write_text(folder / "text")
    for name in ("user_code", "user_code_leaving", "user_code_diverging"):
        shutil.copy(Path(__file__).parent / f"{name}.py", folder)
    return folder


def train(folder: Path, name: str, leave: str, *keys: str) -> tuple[Done, list[RankFailed]]:
    done = run("train", *JOB, f"run.dir={name}", *keys, cwd=folder, env=environment(LEAVE=leave))
    failures = [envelope.event for envelope in events(folder / name, RankFailed)]
    (end,) = (envelope.event for envelope in events(folder / name, RunFinished))
    assert (end.status, end.exit_code) == ("failed", done.code)
    assert "finished" not in done.out
    return done, failures


@pytest.mark.parametrize(
    "how", ["os._exit 0", *(pytest.param(how, marks=pytest.mark.long) for how in LONG_WAYS)]
)
def test_all_ranks_that_leave_in_training_have_crashed(folder: Path, how: str) -> None:
    done, failures = train(folder, f"all {how}", f"01,6,{how}", "resilience.max_restarts=1")
    assert done.code == 10, done.err
    assert [failure.step for failure in failures] == [6, 6]


def test_one_rank_that_leaves_is_the_one_that_is_named(folder: Path) -> None:
    done, failures = train(folder, "one", "1,6,sys.exit 130", "resilience.max_restarts=0")
    assert done.code == 10, done.err
    assert [failure.failed_rank for failure in failures] == [1]
    assert "sys.exit(130) was called before the run was done" in done.err
    assert "user_code_leaving.py" in done.err, "the line that called it"


@pytest.mark.long
def test_a_leave_in_the_first_step_and_in_the_last_evaluation(folder: Path) -> None:
    done, failures = train(folder, "first", "0,1,os._exit 0", "resilience.max_restarts=0")
    assert done.code == 10, done.err
    assert [(failure.failed_rank, failure.step) for failure in failures] == [(0, 1)]
    done, failures = train(
        folder, "eval", "1,eval,os._exit 0", "resilience.max_restarts=0", "eval.tokens=256"
    )
    assert done.code == 10, done.err
    assert [(failure.failed_rank, failure.phase) for failure in failures] == [(1, "evaluate")]


def test_an_error_is_told_although_the_groups_cannot_be_destroyed(folder: Path) -> None:
    done, failures = train(folder, "blocked", "1,6,blocked", "resilience.max_restarts=0")
    assert done.code == 10, done.err
    assert [(failure.failed_rank, failure.step) for failure in failures] == [(1, 6)]
    assert "ValueError: boom" in done.err
    assert (folder / "blocked" / "logs" / "rank-0001-attempt-00.error.json").exists()


@pytest.mark.parametrize(
    "how", ["os._exit 0", *(pytest.param(how, marks=pytest.mark.long) for how in THEIR_LONG_WAYS)]
)
def test_another_launcher_is_not_told_that_the_run_is_done(folder: Path, how: str) -> None:
    keys = [key for key in JOB if key != "parallel.ranks=2"]
    name = f"torchrun {how}"
    env = environment(LEAVE=f"01,6,{how}", OMP_NUM_THREADS="1")
    done = finish(start("train", *keys, f"run.dir={name}", cwd=folder, env=env, command=TORCHRUN))
    assert done.code != 0
    words = {"os._exit 0": "exited with code 0 at step 6", "sys.exit 0": "sys.exit(0) was called"}
    assert words.get(how, "KeyboardInterrupt") in done.err
    assert not [e for e in events(folder / name, RunFinished) if e.event.status != "failed"]


@pytest.mark.long
def test_ranks_whose_collectives_differ_stop_and_are_not_started_again(folder: Path) -> None:
    done, failures = train(
        folder,
        "differ",
        "",
        "model.objective=user_code_diverging:objective",
        "resilience.check_collectives=all",
    )
    assert done.code == 7, done.err
    assert [failure.step for failure in failures] == [3]
    (line,) = (line for line in done.err.splitlines() if "the ranks differ in #" in line)
    assert "rank 1 calls all_reduce sum of float32 [5] in step 3 at " in line
    assert "user_code_diverging.py:" in line
    assert ", rank 0 calls all_reduce avg of float32" in line
    assert not list((folder / "differ" / "blackbox").glob("calls-*"))
