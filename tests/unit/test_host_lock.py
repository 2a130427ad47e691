"""Processes of one machine take a lock in turn; one that dies, or never lets go, is told."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from phalanx.core.errors import EnvironmentProblem
from phalanx.core.host_lock import holding_host_lock

HOLDER = """
import subprocess, sys
from pathlib import Path
from phalanx.core.host_lock import holding_host_lock
with holding_host_lock("build", 60, directory=Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""

# Only the parent prints: two processes that print to one pipe may mix their lines.
FORKING_HOLDER = HOLDER.replace("    print", "    import os\n    if os.fork(): print")


def start_holder(directory: Path, code: str = HOLDER) -> subprocess.Popen[str]:
    """Another process that holds the lock until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_one_process_at_a_time_and_the_one_that_stays_is_named(tmp_path: Path) -> None:
    holder = start_holder(tmp_path)
    try:
        with (
            pytest.raises(EnvironmentProblem, match=f"process {holder.pid} has held"),
            holding_host_lock("build", 0.2, directory=tmp_path),
        ):
            raise AssertionError("two have it")
        entered = threading.Event()

        def wait_for_turn() -> None:
            with holding_host_lock("build", 60, directory=tmp_path):
                entered.set()

        waiter = threading.Thread(target=wait_for_turn)
        waiter.start()
        # It has no chance while the holder lives, and the kernel gives it the lock then.
        holder.kill()
        holder.wait()
        waiter.join(60)
        assert entered.is_set()
    finally:
        holder.kill()
        holder.communicate()


@pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="owners are looked up in /proc")
def test_a_child_that_outlives_its_owner_keeps_nobody_from_the_lock(tmp_path: Path) -> None:
    holder = start_holder(tmp_path, FORKING_HOLDER)
    try:
        holder.kill()
        holder.wait()
        with holding_host_lock("build", 60, directory=tmp_path):
            path = tmp_path / f"phalanx-{os.getuid()}-build.lock"
            assert path.read_text().split()[0] == str(os.getpid())
    finally:
        # Its child, which reads the same input, ends with it.
        holder.communicate()
