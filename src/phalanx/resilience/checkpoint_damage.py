"""What disks and people do to the newest checkpoint of a run, between two attempts of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from phalanx.checkpoint.manifest import MANIFEST_FILE_NAME, list_checkpoint_paths_of_run
from phalanx.core.errors import EnvironmentProblem
from phalanx.core.files import create_regular_file, read_whole_regular_file
from phalanx.resilience.expectation import Expectation

EXPECTATION = Expectation(
    verdict="checkpoint damaged",
    preceded_by=("killed",),
    detected_s=10.0,
    trained_again_s=20.0,
    lost_intervals=2,
    names_rank=False,
    needs_saves=2,
    phases=("data", "forward", "backward"),
    # From memory nothing would be read.
    overrides=(
        "resilience.keep_ranks=false",
        "checkpoint.fallback=true",
        "checkpoint.asynchronous=false",
    ),
)


def find_manifest(run_dir: Path) -> Path:
    """The manifest of the newest checkpoint. Raises EnvironmentProblem where there is none."""
    checkpoints = list_checkpoint_paths_of_run(run_dir)
    if not checkpoints:
        raise EnvironmentProblem("the run has no checkpoint yet that a fault could damage")
    return checkpoints[-1] / MANIFEST_FILE_NAME


def find_largest_shard(run_dir: Path) -> Path:
    """The largest file of tensors of the newest checkpoint."""
    files = find_manifest(run_dir).parent.iterdir()
    shards = [path for path in files if path.name != MANIFEST_FILE_NAME]
    return max(shards, key=lambda path: path.stat().st_size)


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Give a file the bytes that `change` makes of its own. Other checkpoints that share it by a
    hard link keep theirs."""
    content = change(read_whole_regular_file(path))
    with create_regular_file(path) as file:
        file.write(content)


def kill_rank() -> None:
    """SIGKILL to this process: now the checkpoint is needed."""
    os.kill(os.getpid(), signal.SIGKILL)
