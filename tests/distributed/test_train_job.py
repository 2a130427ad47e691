"""`phalanx.train_job`: what the command does, from Python."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import phalanx
from commands import TINY, loss_curve, write_text
from phalanx.core.errors import ExitCode
from phalanx.job.schema import Model

SMALL = [*TINY, "train.steps=4", "parallel.ranks=2", "checkpoint.every_steps=2"]


@pytest.fixture
def job(tmp_path: Path) -> phalanx.Job:
    source = write_text(tmp_path / "text")
    overrides = [*SMALL, "eval.tokens=200", f"data.source={source}", f"run.dir={tmp_path / 'run'}"]
    return phalanx.load_job(None, overrides)


def test_a_thread_trains_and_says_nothing(
    job: phalanx.Job, capfd: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(phalanx.train_job, job, quiet=True).result()
    run_dir = Path(str(job.run.dir))
    assert (result.run_dir, result.status, result.exit_code, result.error) == (
        run_dir,
        "finished",
        0,
        "",
    )
    assert result.last_step == 4
    assert result.metrics["loss"] == loss_curve(run_dir)[4]
    assert 0 < result.metrics["held_out_loss"] < 10
    assert result.newest_checkpoint == str(run_dir / "checkpoints" / "step-4")
    assert (result.plan.world_size, result.plan.num_params > 0) == (2, True)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(phalanx.PhalanxError, match="a run is there already"):
        phalanx.train_job(job, quiet=True)
    again = phalanx.resume_job(run_dir, quiet=True)
    assert (again.status, again.last_step, again.metrics) == ("finished", 4, result.metrics)


def test_a_run_that_fails_says_why_and_goes_on(
    job: phalanx.Job, capfd: pytest.CaptureFixture[str]
) -> None:
    fault = {"inject": ("crash:rank=1,step=3,phase=backward",), "max_restarts": 0}
    broken = job.model_copy(update={"resilience": job.resilience.model_copy(update=fault)})
    result = phalanx.train_job(broken)
    assert (result.status, result.exit_code) == ("failed", ExitCode.RESTART_BUDGET)
    assert "rank 1" in result.error
    assert result.error in capfd.readouterr().err
    assert (result.last_step, result.newest_checkpoint) == (
        2,
        str(result.run_dir / "checkpoints" / "step-2"),
    )
    resumed = phalanx.resume_job(result.run_dir, ["resilience.inject=[]"], quiet=True)
    assert (resumed.status, resumed.last_step) == ("finished", 4)
    assert capfd.readouterr() == ("", "")


def test_what_a_cell_defines_is_refused_with_the_way_out(job: phalanx.Job) -> None:
    """Loaded or made in Python: nothing is started, and no directory is left."""
    words = "model.kind.*ranks are other processes.*my_code:Net"
    with pytest.raises(phalanx.PhalanxError, match=words):
        phalanx.load_job(None, ["model.kind=__main__:Net"])
    made = job.model_copy(update={"model": Model(kind="__main__:Net")})
    with pytest.raises(phalanx.PhalanxError, match=words):
        phalanx.train_job(made)
    assert not Path(str(job.run.dir)).exists()
