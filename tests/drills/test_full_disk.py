"""A real file system that runs full while a job trains on it: nothing is lost but the saves that
did not fit."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import TINY, environment, events, start, watching, write_text
from phalanx.checkpoint.folder import CheckpointFolder
from phalanx.checkpoint.reading.verify import find_checkpoint_problems
from phalanx.checkpoint.stores.local import LocalStore
from phalanx.observe.events import CheckpointFailed, CheckpointSaved

SIZE_BYTES = 24 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    place = tmp_path / "disk"
    place.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", place], capture_output=True
    )
    if mount.returncode:
        pytest.skip(f"no file system can be mounted here: {mount.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_training_goes_on_says_what_to_do_and_saves_once_there_is_space(
    small_disk: Path, tmp_path: Path
) -> None:
    write_text(tmp_path / "text")
    run_dir = small_disk / "run"
    job = (
        *TINY,
        "data.source=text",
        "parallel.ranks=2",
        "model.dim=64",
        "train.steps=1000000",
        "checkpoint.keep_last=2",
    )
    process = start(
        "train",
        *job,
        "checkpoint.every_steps=4",
        f"run.dir={run_dir}",
        cwd=tmp_path,
        env=environment(TMPDIR=None),
    )
    with watching(process) as watched:
        watched.wait_for("saved checkpoint")
        filler = small_disk / "filler"
        fill(filler)
        failure = watched.wait_for("failed")
        assert "No space left" in failure
        assert "free space there" in failure
        before = newest(run_dir)
        watched.wait_for("step ")  # training goes on
        assert process.poll() is None
        filler.unlink()
        watched.wait_for("saved checkpoint")
        process.terminate()
        assert watched.finish().code == 75
    found = [envelope.event for envelope in events(run_dir)]
    failed = [event.step for event in found if isinstance(event, CheckpointFailed)]
    saved = [event.step for event in found if isinstance(event, CheckpointSaved)]
    assert min(saved) < failed[0] < max(saved)
    assert newest(run_dir).step > before.step
    assert find_checkpoint_problems(newest(run_dir)) == []
    assert not list((run_dir / "checkpoints").glob(".*"))


def fill(path: Path) -> None:
    """Until a checkpoint no longer fits, and an event still does."""
    with open(path, "wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
        file.truncate(max(0, file.tell() - (100 << 10)))


def newest(run_dir: Path) -> CheckpointFolder:
    return LocalStore(run_dir / "checkpoints").folders()[-1]
