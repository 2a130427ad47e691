"""What faults of disks, descriptors and inodes do to the system's calls, each in a process of its
own: they fail while the fault goes on, and only where they should."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.core.errors import EnvironmentProblem
from phalanx.drills.failing_disk import FailingDisk
from phalanx.drills.stages import find_reason_against_stage, opening_stage
from phalanx.resilience.failing_disk import fail_writes_below
from phalanx.resilience.own_mounts import require_own_mounts

PREAMBLE = """
import errno, os, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from phalanx.resilience.fault import FaultSite

folder = Path(sys.argv[1])
state = SimpleNamespace(step=7)
site = FaultSite(0, folder, SimpleNamespace(state=state))

def refusal(path):
    try:
        with open(path, "wb", buffering=0) as file:
            file.write(b"x")
            os.fsync(file.fileno())
        return ""
    except OSError as error:
        return errno.errorcode[error.errno]

def refusals():
    return refusal(folder / "checkpoints" / "a"), refusal(folder / "checkpoints-not" / "a")

def end_after(num_steps):
    state.step += num_steps
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("checkpoints", "checkpoints-not"):
        (tmp_path / "run" / name).mkdir(parents=True)
    return tmp_path / "run"


def run_in_child(code: str, folder: Path, prefix: tuple[str, ...] = ()) -> list[str]:
    command = [*prefix, sys.executable, "-c", PREAMBLE + code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def stage_prefix(name: str, folder: Path) -> tuple[str, ...]:
    if why := find_reason_against_stage(name):
        pytest.skip(why)
    with opening_stage(name, folder) as prefix:
        return prefix


def test_writes_of_checkpoints_fail_and_no_others_until_some_steps_are_done(
    folder: Path, tmp_path: Path
) -> None:
    code = """
from phalanx.resilience.faults import disk_eio
print(*refusals(), sep=",")
disk_eio.inject(site)
print(*refusals(), sep=",")
state.step += disk_eio.NUM_FAILING_STEPS - 1
print(*refusals(), sep=",")
end_after(1)
print(*refusals(), sep=",")
"""
    prefix = stage_prefix("failing_disk", tmp_path / "stage")
    assert run_in_child(code, folder, prefix) == [",", "EIO,", "EIO,", ","]


def test_each_write_and_each_sync_waits(folder: Path, tmp_path: Path) -> None:
    code = """
from phalanx.resilience.failing_disk import fail_writes_below
fail_writes_below(folder / "checkpoints", delay_ms=100)
for name in ("checkpoints", "checkpoints-not"):
    began = time.monotonic()
    assert refusal(folder / name / "a") == ""
    print(time.monotonic() - began >= 0.2)
"""
    prefix = stage_prefix("failing_disk", tmp_path / "stage")
    assert run_in_child(code, folder, prefix)[0] == "True"


def test_a_directory_is_read_only_for_its_run_alone(folder: Path, tmp_path: Path) -> None:
    code = """
from phalanx.resilience.faults import disk_read_only
opened = open(folder / "events", "wb", buffering=0)
disk_read_only.inject(site)
print(*refusals(), sep=",")
opened.write(b"x")
input()
end_after(disk_read_only.NUM_READ_ONLY_STEPS)
print(*refusals(), sep=",")
"""
    prefix = stage_prefix("own_mounts", tmp_path / "stage")
    command = [*prefix, sys.executable, "-c", PREAMBLE + code, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "EROFS,EROFS\n"
        (folder / "checkpoints" / "outside").touch()
        output, _ = child.communicate("\n")
    assert output == ",\n"
    assert child.returncode == 0


def test_no_file_can_be_opened_until_some_steps_are_done(folder: Path) -> None:
    code = """
from phalanx.resilience.faults import no_descriptors
held = open("/dev/null")
no_descriptors.inject(site)
found = [refusal(folder / "a")]
held.close()
# What is closed is taken, too.
while refusal("/dev/null") != "EMFILE":
    time.sleep(0.001)
end_after(no_descriptors.NUM_STEPS_WITHOUT)
print(*found, refusal(folder / "a"), len(os.listdir("/proc/self/fd")) < 10, sep=",")
"""
    assert run_in_child(code, folder) == ["EMFILE,,True"]


def test_a_disk_of_few_inodes_has_none_until_some_steps_are_done(tmp_path: Path) -> None:
    if why := find_reason_against_stage("few_inodes"):
        pytest.skip(why)
    code = """
from phalanx.resilience.faults import no_inodes
(folder / "old").touch()
no_inodes.inject(site)
print(refusal(folder / "new"), refusal(folder / "old"), sep=",")
end_after(no_inodes.NUM_STEPS_WITHOUT)
print(refusal(folder / "new"), *sorted(os.listdir(folder)), sep=",")
"""
    with opening_stage("few_inodes", tmp_path / "disk"):
        assert run_in_child(code, tmp_path / "disk") == ["ENOSPC,", ",new,old"]


def test_a_run_has_a_shared_memory_of_its_own_that_can_be_filled(tmp_path: Path) -> None:
    code = """
from phalanx.resilience.faults import shm_full
os.kill = lambda pid, number: None
shm_full.inject()
print(os.statvfs("/dev/shm").f_bavail)
"""
    prefix = stage_prefix("small_shared_memory", tmp_path / "stage")
    assert run_in_child(code, tmp_path, prefix) == ["0"]
    assert os.statvfs("/dev/shm").f_bavail > 0
    assert not Path("/dev/shm/filler").exists()


def test_without_its_stage_a_fault_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EnvironmentProblem, match="phalanx drill"):
        fail_writes_below(tmp_path)
    with pytest.raises(EnvironmentProblem, match="phalanx drill"):
        require_own_mounts()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "(cc)" in find_reason_against_stage("failing_disk")
    with pytest.raises(EnvironmentProblem, match="no C compiler"):
        FailingDisk.build(tmp_path)
