"""Ranks that somebody else starts: torchrun, and plain environment variables."""

from __future__ import annotations

import re
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_bad_input import rank_environment

from commands import TINY, Done, environment, finish, loss_curve, run, start, weights, write_text
from ports import free_port

JOB = (*TINY, "data.source=text", "eval.tokens=512", "checkpoint.every_steps=10")
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
MAX_FILE_BYTES = 32 << 20


@dataclass(frozen=True)
class Reference:
    folder: Path
    done: Done

    @property
    def dir(self) -> Path:
        return self.folder / "run"

    def interrupted(self, name: str) -> Path:
        """A copy of the run as if it had been killed on its way from step 10 to 20."""
        copy = self.folder / name
        shutil.copytree(self.dir, copy)
        shutil.rmtree(copy / "checkpoints" / "step-20")
        return copy


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same job under phalanx's own supervisor."""
    folder = tmp_path_factory.mktemp("reference")
    write_text(folder / "text")
    done = run("train", *JOB, "parallel.ranks=2", "run.dir=run", cwd=folder)
    assert done.code == 0, done.err
    return Reference(folder, done)


@pytest.mark.long
def test_torchrun_needs_no_run_directory_and_changes_no_bit(reference: Reference) -> None:
    done = finish(
        start(
            "train",
            *JOB,
            cwd=reference.folder,
            env=environment(OMP_NUM_THREADS="1"),
            command=TORCHRUN,
        )
    )
    assert done.code == 0, done.err
    (run_dir,) = (reference.folder / "runs").iterdir()
    assert loss_curve(run_dir) == loss_curve(reference.dir)
    assert weights(run_dir) == weights(reference.dir)
    lines = done.out.splitlines()
    assert (
        lines[0] == lines[-1] == f"run     {run_dir.relative_to(reference.folder)}"
    )  # one rank speaks for all
    assert re.search(r"^loss +held out.*trigram", done.out, re.MULTILINE)
    assert (run_dir / "report.html").exists()
    assert not (run_dir / "lock").exists()


TWO_RUNS = """
import sys
import phalanx

for name in ("first", "second"):
    job = phalanx.load_job(None, [*sys.argv[1:], f"run.dir={name}"])
    result = phalanx.train_job(job, quiet=True)
    assert (result.status, result.last_step) == ("finished", 20), result
result = phalanx.resume_job("second", ["train.steps=22"], quiet=True)
assert (result.status, result.last_step) == ("finished", 22), result
"""


def test_one_script_trains_and_resumes_under_torchrun(reference: Reference) -> None:
    """Each run of the same processes is one of its own: it reads nothing that the run before
    agreed on."""
    folder = reference.folder
    (folder / "two_runs.py").write_text(TWO_RUNS)
    done = finish(
        start(
            "two_runs.py",
            *JOB,
            cwd=folder,
            env=environment(OMP_NUM_THREADS="1"),
            command=TORCHRUN[:-2],
        )
    )
    assert done.code == 0, done.err
    for name in ("first", "second"):
        losses = loss_curve(folder / name)
        assert {step: losses[step] for step in range(1, 21)} == loss_curve(reference.dir)


@pytest.mark.long
def test_a_run_is_resumed_under_torchrun(reference: Reference) -> None:
    copy = reference.interrupted("under torchrun")
    arguments = ["train", "--resume", copy.name]
    done = finish(
        start(
            *arguments, cwd=reference.folder, env=environment(OMP_NUM_THREADS="1"), command=TORCHRUN
        )
    )
    assert done.code == 0, done.err
    assert "continues at step 10 from step-10" in done.out
    assert loss_curve(copy) == loss_curve(
        reference.dir
    )  # which also holds the steps of both attempts against another
    assert weights(copy) == weights(reference.dir)


@pytest.mark.long
def test_a_script_whose_ranks_hold_their_own_store_trains_twice(reference: Reference) -> None:
    """Without torchrun's store rank 0 holds one, to the end of its process."""
    folder, port = reference.folder, free_port()
    (folder / "by_hand.py").write_text(
        TWO_RUNS.replace('"first", "second"', '"third", "fourth"').replace('"second"', '"fourth"')
    )
    ranks = [
        start(
            "by_hand.py",
            *JOB,
            cwd=folder,
            env=rank_environment(rank, 2, port),
            command=(sys.executable,),
        )
        for rank in range(2)
    ]
    done = [finish(rank) for rank in ranks]
    assert [d.code for d in done] == [0, 0], [d.err for d in done]


@pytest.mark.long
def test_ranks_started_by_hand(reference: Reference) -> None:
    """Two processes with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, of a run
    started by ourselves."""
    copy, port = reference.interrupted("by hand"), free_port()
    ranks = [
        start(
            "train",
            "--resume",
            copy.name,
            cwd=reference.folder,
            env=rank_environment(rank, 2, port),
        )
        for rank in range(2)
    ]
    done = [finish(rank) for rank in ranks]
    assert [d.code for d in done] == [0, 0], [d.err for d in done]
    assert done[1].out == ""
    assert loss_curve(copy) == loss_curve(reference.dir)
    assert weights(copy) == weights(reference.dir)


SLURM = {"SLURM_JOB_NODELIST": "localhost", "SLURM_NTASKS": "2"}


def of_slurm(rank: int, port: int) -> dict[str, str]:
    return SLURM | {
        "SLURM_JOB_ID": str(port),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def of_open_mpi(rank: int, port: int) -> dict[str, str]:
    place = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {"MASTER_PORT": str(port)} | {
        f"OMPI_COMM_WORLD_{name}": str(value) for name, value in place.items()
    }


def of_hydra(rank: int, port: int) -> dict[str, str]:
    return {"PMI_RANK": str(rank), "PMI_SIZE": "2", "PMI_JOBID": str(port)}


@pytest.mark.parametrize(
    ("place_of", "origin"),
    [
        (of_slurm, "Slurm"),
        pytest.param(of_open_mpi, "Open MPI", marks=pytest.mark.long),
        pytest.param(of_hydra, "PMI", marks=pytest.mark.long),
    ],
)
def test_tasks_of_another_launcher_train_one_job(
    reference: Reference, place_of: Callable[[int, int], dict[str, str]], origin: str
) -> None:
    """Without a variable of torch's: one training, told by rank 0 alone, with the losses of our
    own two ranks."""
    copy, port = reference.interrupted(f"of {origin}"), free_port()
    tasks = [
        start(
            "train",
            "--resume",
            copy.name,
            cwd=reference.folder,
            env=environment(OMP_NUM_THREADS="1") | place,
        )
        for place in (place_of(0, port), place_of(1, port))
    ]
    done = [finish(task) for task in tasks]
    assert [d.code for d in done] == [0, 0], [d.err for d in done]
    assert (
        len(
            re.findall(
                rf"^ranks   from {origin}: 2 .*; rank 0 at 127\.0\.0\.1:\d+$",
                done[0].out,
                re.MULTILINE,
            )
        )
        == 1
    )
    assert done[1].out == ""
    assert loss_curve(copy) == loss_curve(reference.dir)
    assert weights(copy) == weights(reference.dir)
    # What the tasks printed is their launcher's: here a pipe that this test reads.
    logs = run("logs", copy.name, cwd=reference.folder)
    assert logs.code == 0
    assert f"no log here of ranks 0 and 1, attempt 1: {origin} has its output, a pipe" in logs.err


def test_a_batch_script_of_slurm_starts_its_own_ranks(reference: Reference) -> None:
    """It has SLURM_PROCID and SLURM_NTASKS as a task of srun has, and nobody starts the other
    one."""
    copy = reference.interrupted("in a batch script")
    place = of_slurm(0, 4711) | {"ENVIRONMENT": "BATCH", "SLURM_SUBMIT_DIR": "/somewhere"}
    done = run("train", "--resume", copy.name, cwd=reference.folder, env=environment() | place)
    assert done.code == 0, done.err
    assert loss_curve(copy) == loss_curve(reference.dir)


def test_half_of_slurms_variables_are_refused_before_anything_is_written(
    reference: Reference,
) -> None:
    place = of_slurm(1, 4711) | {"SLURM_LOCALID": ""}
    done = run("train", *JOB, "run.dir=none", cwd=reference.folder, env=environment() | place)
    assert done.code == 6
    assert "SLURM_NTASKS is 2 and SLURM_LOCALID is not set" in done.problem
    assert not (reference.folder / "none").exists()


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_an_end_that_cannot_be_recorded_is_no_success(
    world_size: int, reference: Reference
) -> None:
    """Files may grow to 32 MiB, and the one that takes the end of the run is as large: all else
    is written.

    The limit is set while the ranks find each other: a shell that sets it first would start them
    without what is imported already.
    """
    run_dir, port = reference.folder / f"unrecorded {world_size}", free_port()
    (run_dir / "events").mkdir(parents=True)
    with open(run_dir / "events" / "supervisor.jsonl", "wb") as file:
        file.truncate(MAX_FILE_BYTES)
    ranks = [
        start(
            *("train", *JOB, f"run.dir={run_dir}"),
            cwd=reference.folder,
            env=rank_environment(rank, world_size, port),
        )
        for rank in range(world_size)
    ]
    for rank in ranks:
        resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    first, *others = [finish(rank) for rank in ranks]
    assert first.code == 7, first.out + first.err
    assert [rank.code for rank in others] == [0] * (world_size - 1)
    assert "recording that the run is finished (its last step is saved)" in first.err
    assert (run_dir / "checkpoints" / "step-20").exists()
