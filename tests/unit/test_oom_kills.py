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
