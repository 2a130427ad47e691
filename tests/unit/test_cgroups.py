"""The limits of memory that control groups set, in copies of the kernel's files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from phalanx.core import cgroups
from phalanx.core.cgroups import read_memory_limit
from phalanx.plan import cluster

GIB = 2**30


def write_cgroups(folder: Path, own: str, files: dict[str, int | str]) -> tuple[Path, Path]:
    """(a copy of /proc/self/cgroup, a copy of /sys/fs/cgroup)."""
    folder.mkdir()
    (folder / "own").write_text(own)
    for name, value in files.items():
        path = folder / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return folder / "own", folder / "fs"


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        # Slurm, version 2: the limit is the job's, around the task that sees all of it.
        (
            "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n",
            {
                "system.slice/slurmstepd.scope/job_7/memory.max": 32 * GIB,
                "system.slice/slurmstepd.scope/job_7/step_0/user/task_0/memory.max": "max",
            },
            32 * GIB,
        ),
        # Version 1: a number near 2**63 is none.
        (
            "5:cpu:/x\n4:memory:/slurm/uid_1/job_7/step_0\n",
            {
                "memory/memory.limit_in_bytes": 9223372036854771712,
                "memory/slurm/uid_1/job_7/memory.limit_in_bytes": 32 * GIB,
                "memory/slurm/uid_1/job_7/step_0/memory.limit_in_bytes": 33 * GIB,
            },
            32 * GIB,
        ),
        # A container whose own cgroup is the topmost one.
        ("0::/\n", {"memory.max": GIB}, GIB),
        ("4:memory:/docker/1\n", {"memory/memory.limit_in_bytes": GIB}, GIB),
        ("0::/user.slice\n", {"user.slice/memory.max": "max"}, math.inf),
        ("", {}, math.inf),
    ],
)
def test_a_limit_of_memory_is_the_least_of_all_cgroups_around(
    tmp_path: Path, own: str, files: dict[str, int | str], limit: float
) -> None:
    assert read_memory_limit(*write_cgroups(tmp_path / "c", own, files)) == limit


def test_a_plan_counts_with_the_limit_of_the_batch_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = write_cgroups(tmp_path / "c", "0::/job_7/task_0\n", {"job_7/memory.max": 3 << 20})
    monkeypatch.setattr(cluster, "read_memory_limit", lambda: cgroups.read_memory_limit(*places))
    assert cluster.detect_cluster("cpu").memory_bytes == 3 << 20
