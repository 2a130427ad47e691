"""What a job must not write once another one has its run, at the moments at which no step asks
the fence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.checkpoint.best import read_best_step
from phalanx.checkpoint.ownership.fence import RunOwnershipWatch
from phalanx.checkpoint.ownership.fencing_token import write_next_fencing_token
from phalanx.checkpoint.ownership.run_lock import LOCK_FILE_NAME, holding_run_lock
from phalanx.checkpoint.run_storage import RunStorage
from phalanx.checkpoint.stores.local import LocalStore
from phalanx.core.errors import RunLockedError, RunTakenError
from phalanx.job.load import load_job
from phalanx.mesh.mesh import open_mesh
from phalanx.observe.bus import Bus
from phalanx.plan.layout import Layout
from phalanx.run.directory import hold_run_facts_files
from phalanx.run.weights import list_checkpoints_newest_first
from phalanx.train.best import BestCheckpointRecorder
from phalanx.train.evaluation import EvalScore


def test_no_best_is_named_and_nothing_is_cleaned_up_in_another_jobs_run(tmp_path: Path) -> None:
    ours = write_next_fencing_token(tmp_path)
    fence = RunOwnershipWatch(tmp_path, None, ours)
    store = LocalStore(tmp_path / "checkpoints")
    store.root.mkdir()
    storage = RunStorage(tmp_path, store, fence)
    bus = Bus(rank=0)
    with open_mesh(Layout(), device="cpu") as mesh:
        best = BestCheckpointRecorder(load_job(None, []), mesh, bus, storage)
        best.record_best(4, EvalScore(1.25, 9, 1.25))
        first = store.begin_draft(8).path
        assert list_checkpoints_newest_first(storage, mesh) == []
        assert not first.exists()  # of an earlier job, half written
        write_next_fencing_token(tmp_path, taker="process 7 on another host")
        theirs = store.begin_draft(9).path
        best.record_best(5, EvalScore(1.0, 9, 1.0))
        with pytest.raises(RunTakenError, match="process 7 on another host"):
            list_checkpoints_newest_first(storage, mesh)
    named = read_best_step(tmp_path)
    assert named is not None
    assert named.step == 4
    assert theirs.is_dir()


def test_the_facts_of_the_job_that_took_the_run_stay(tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    job.write_text('"old"')

    def take_over() -> None:
        (tmp_path / LOCK_FILE_NAME).unlink()
        job.write_text('"theirs"')

    with (
        holding_run_lock(tmp_path) as lock,
        hold_run_facts_files(tmp_path, lock, {"job.json": "ours"}),
    ):
        pass  # no step was done: it was refused after all
    assert json.loads(job.read_text()) == "old"
    with (
        holding_run_lock(tmp_path) as lock,
        hold_run_facts_files(tmp_path, lock, {"job.json": "ours"}),
    ):
        take_over()
    assert json.loads(job.read_text()) == "theirs"
    with holding_run_lock(tmp_path) as lock:
        take_over()
        with (
            pytest.raises(RunLockedError),
            hold_run_facts_files(tmp_path, lock, {"job.json": "ours"}),
        ):
            pass
    assert json.loads(job.read_text()) == "theirs"
