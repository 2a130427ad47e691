"""A kill for memory is told from any other SIGKILL by the kernel's own count, in a real cgroup."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import wait_until
from phalanx.launch import oom_kills
from phalanx.launch.oom_kills import OomKill, OomWatch, find_memory_limit

MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 64 << 20
# Joins the cgroup, says so, and takes memory without end once it hears a line.
TAKES_MEMORY = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
print(flush=True)
input()
held = []
while True:
    held.append(b"1" * (1 << 20))
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    can_limit = (MEMORY_CGROUPS / "memory.limit_in_bytes").exists()
    # Containers may have all cgroups for reading only.
    if os.geteuid() or not can_limit or not os.access(MEMORY_CGROUPS, os.W_OK):
        pytest.skip("a limit of memory takes root and the memory controller (version 1)")
    place = MEMORY_CGROUPS / f"phalanx-tests-{os.getpid()}"
    place.mkdir()
    try:
        (place / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        yield place
    finally:
        wait_until(lambda: not (place / "cgroup.procs").read_text())
        place.rmdir()


def start_in(cgroup: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", TAKES_MEMORY, str(cgroup)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_kill_for_memory_is_told_from_another_one(cgroup: Path) -> None:
    greedy, other = start_in(cgroup), start_in(cgroup)
    watch = OomWatch()
    watch.begin([greedy.pid, other.pid])
    assert watch.ranks == {0, 1}
    assert find_memory_limit(greedy.pid) == LIMIT_BYTES
    other.kill()
    other.communicate()
    assert watch.find_kill(1) is None
    greedy.communicate(b"\n")
    assert greedy.returncode == -signal.SIGKILL
    assert watch.find_kill(0) == OomKill(f"/{cgroup.name}", LIMIT_BYTES)
    # One kill explains one death.
    assert watch.find_kill(1) is None


def test_a_process_outside_of_such_a_cgroup_was_not_killed_for_memory() -> None:
    watch = OomWatch()
    watch.begin([os.getpid()])
    assert watch.find_kill(0) is None
    assert watch.find_kill(7) is None


V1 = "35 30 0:31 / /sys/fs/cgroup/memory rw,relatime shared:16 - cgroup cgroup rw,memory\n"
V2 = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = f"{V1}31 30 0:27 / /sys/fs/cgroup/unified rw shared:5 - cgroup2 cgroup2 rw\n"
EVENTS = "low 0\nhigh 0\nmax 12\noom 1\noom_kill {kills}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"


@pytest.mark.parametrize(
    ("mounts", "own", "files", "expected"),
    [
        pytest.param(
            V2,
            "0::/job/rank\n",
            {
                "/sys/fs/cgroup/job/rank/memory.events": EVENTS,
                "/sys/fs/cgroup/job/rank/memory.max": "67108864\n",
            },
            OomKill("/job/rank", LIMIT_BYTES),
            id="version 2",
        ),
        pytest.param(
            V2,
            "0::/job\n",
            {
                "/sys/fs/cgroup/job/memory.events": EVENTS,
                "/sys/fs/cgroup/job/memory.max": "max\n",
            },
            OomKill("/job", 0),
            id="version 2 without a limit",
        ),
        # Slurm limits a job, and starts each task in a cgroup of its own inside of it.
        pytest.param(
            V2,
            "0::/job_7/step_0/task_0\n",
            {
                "/sys/fs/cgroup/job_7/step_0/memory.events": EVENTS,
                "/sys/fs/cgroup/job_7/step_0/memory.max": "max\n",
                "/sys/fs/cgroup/job_7/memory.max": "67108864\n",
            },
            OomKill("/job_7", LIMIT_BYTES),
            id="version 2 with a limit around it",
        ),
        pytest.param(
            V1,
            "9:memory:/job_7/step_0\n",
            {
                "/sys/fs/cgroup/memory/job_7/step_0/memory.oom_control": CONTROL,
                "/sys/fs/cgroup/memory/job_7/step_0/memory.limit_in_bytes": "67108865\n",
                "/sys/fs/cgroup/memory/job_7/memory.limit_in_bytes": "67108864\n",
            },
            OomKill("/job_7", LIMIT_BYTES),
            id="version 1 with a limit around it",
        ),
        pytest.param(
            V2,
            "0::/../outside\n",
            {"/sys/fs/cgroup/memory.events": EVENTS, "/sys/fs/cgroup/memory.max": "67108864\n"},
            OomKill("/", LIMIT_BYTES),
            id="version 2 in a namespace",
        ),
        pytest.param(
            HYBRID,
            "9:memory:/job\n3:cpu,cpuacct:/other\n0::/init\n",
            {
                "/sys/fs/cgroup/memory/job/memory.oom_control": CONTROL,
                "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "67108864\n",
            },
            OomKill("/job", LIMIT_BYTES),
            id="version 1 beside version 2",
        ),
        pytest.param(
            V1,
            "9:memory:/job\n",
            {
                "/sys/fs/cgroup/memory/job/memory.oom_control": CONTROL,
                "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
            },
            OomKill("/job", 0),
            id="version 1 without a limit",
        ),
        pytest.param(
            V1,
            "9:memory:/job\n",
            {
                "/sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\n",
                "/proc/vmstat": "pgfault 7\noom_kill {kills}\n",
            },
            OomKill("", 0),
            id="a kernel that counts of the machine alone",
        ),
    ],
)
def test_counts_are_found_where_either_version_has_them(
    mounts: str,
    own: str,
    files: dict[str, str],
    expected: OomKill,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kills = 3
    texts = {"/proc/self/mountinfo": mounts, "/proc/7/cgroup": own, **files}

    def read_text(path: Path) -> str:
        return texts.get(str(path), "").format(kills=kills)

    monkeypatch.setattr(oom_kills, "_read_text", read_text)
    watch = OomWatch()
    watch.begin([7])
    assert watch.ranks == {0}
    assert find_memory_limit(7) == expected.limit_bytes
    assert watch.find_kill(0) is None
    kills += 1
    assert watch.find_kill(0) == expected
    assert watch.find_kill(0) is None


def test_without_any_count_no_kill_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom_kills, "_read_text", lambda path: "")
    watch = OomWatch()
    watch.begin([7])
    assert not watch.ranks
    assert watch.find_kill(0) is None
    assert find_memory_limit(7) == 0
