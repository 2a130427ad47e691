"""A run goes on with the data that its checkpoints were trained on, wherever that lies."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from commands import write_text
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.stores.local import LocalStore
from phalanx.core.errors import DataError, ExitCode
from phalanx.job.load import load_job
from phalanx.run.prepare import prepare_run


def resume(job: list[str], run_dir: Path) -> list[str]:
    """What is said of its data where a run goes on."""
    with prepare_run(load_job(None, job), run_dir, resume=True, num_ranks=None) as run:
        return list(run.unverified)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    text = write_text(tmp_path / "text")
    return ["model.dim=32", "model.num_layers=1", "data.seq_len=32", f"data.source={text}"]


def begin(job: list[str], run_dir: Path, *, says_data: bool = True) -> None:
    """A run with a checkpoint of step 5."""
    with prepare_run(load_job(None, job), run_dir, resume=False, num_ranks=None) as run:
        facts = {"step": 5}
        if says_data:
            facts["data"] = run.corpus.content_digest
    store = LocalStore(run_dir / "checkpoints")
    draft = store.begin_draft(5)
    store.commit(draft, Manifest(5, "", {}, facts, {}, {}, {}).to_bytes())


def exchange_text(job: list[str]) -> None:
    text = Path(job[-1].removeprefix("data.source="))
    for path in [text] if text.is_file() else sorted(text.iterdir()):
        path.write_bytes(path.read_bytes().swapcase())


def test_data_that_is_gone_is_prepared_again_if_it_is_the_same(
    job: list[str], run_dir: Path
) -> None:
    begin(job, run_dir)
    shutil.rmtree(run_dir / "data")
    assert resume(job, run_dir) == []
    assert (run_dir / "data" / "corpus.json").exists()


def test_other_data_is_refused_and_nothing_of_it_stays(job: list[str], run_dir: Path) -> None:
    begin(job, run_dir)
    exchange_text(job)
    assert resume(job, run_dir) == [], "what was built is read, whatever becomes of the text"
    kept = run_dir.parent / "kept"
    shutil.move(run_dir / "data", kept)
    with pytest.raises(DataError, match="the corpus has changed since the run began") as caught:
        resume(job, run_dir)
    assert caught.value.exit_code is ExitCode.DATA
    assert not (run_dir / "data").exists()
    shutil.move(kept, run_dir / "data")
    assert resume(job, run_dir) == []


def test_the_folder_of_another_run_is_refused(job: list[str], run_dir: Path) -> None:
    begin(job, run_dir)
    exchange_text(job)
    begin(job, run_dir.parent / "other")
    shutil.rmtree(run_dir / "data")
    shutil.move(run_dir.parent / "other" / "data", run_dir / "data")
    with pytest.raises(DataError, match="the corpus has changed since the run began"):
        resume(job, run_dir)


def test_a_checkpoint_that_does_not_say_its_data_goes_on_and_that_is_said(
    job: list[str], run_dir: Path
) -> None:
    """Of an earlier release."""
    begin(job, run_dir, says_data=False)
    assert resume(job, run_dir) == []
    shutil.rmtree(run_dir / "data")
    (line,) = resume(job, run_dir)
    assert "step-5, of an earlier release, does not say" in line
