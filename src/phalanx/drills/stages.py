"""What some faults need around a run, and a drill builds for it: a small disk or one that fails,
limits of memory and of processors, mounts, a clock and a network of its own."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import EnvironmentProblem
from phalanx.drills.failing_disk import FailingDisk
from phalanx.drills.stepped_clock import SteppedClock
from phalanx.resilience.cpu_quota import CPU_QUOTA_VARIABLE
from phalanx.resilience.own_mounts import OWN_MOUNTS_VARIABLE

DISK_BYTES = 64 << 20
# A run of a drill makes a few hundred files.
NUM_INODES = 4000
# Ten times what the small job shares; to fill it counts in the time of detection.
SHARED_MEMORY_BYTES = 16 << 20
# Two ranks of a small job use less; one that asks for more and more is soon there.
MEMORY_BYTES = 1 << 30
_MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")
_CPU_CGROUPS = Path("/sys/fs/cgroup/cpu")
# Of each 100 ms.
CPU_QUOTA_US = 5_000


@dataclass(frozen=True)
class Stage:
    """`why_not`: the reason why it cannot be built here ("": it can). `opening`: builds it for the
    body, for a run below a folder, and gives the words that the run's command begins with."""

    why_not: Callable[[], str]
    opening: Callable[[Path], contextlib.AbstractContextManager[tuple[str, ...]]]


def find_reason_against_stage(name: str) -> str:
    """Why a fault that needs the stage `name` cannot run here; "" if it can, or needs none."""
    return STAGES[name].why_not() if name else ""


@contextlib.contextmanager
def opening_stage(name: str, folder: Path) -> Iterator[tuple[str, ...]]:
    """Build the stage `name` for the body, for a run below `folder`; gives the words that the run's
    command begins with. Raises EnvironmentProblem."""
    if not name:
        yield ()
        return
    with STAGES[name].opening(folder) as prefix:
        yield prefix


def _find_reason_against_disk() -> str:
    return "" if os.geteuid() == 0 else "needs root, to mount a small file system"


@contextlib.contextmanager
def _mounting_small_disk(
    folder: Path, options: str = f"size={DISK_BYTES}"
) -> Iterator[tuple[str, ...]]:
    """Inside, `folder` is an empty file system of 64 MiB in memory."""
    folder.mkdir(parents=True)
    _run_or_raise(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        "no small file system can be mounted",
    )
    try:
        yield ()
    finally:
        _run_quietly(["umount", "-l", str(folder)])


def _mounting_disk_of_few_inodes(
    folder: Path,
) -> contextlib.AbstractContextManager[tuple[str, ...]]:
    """As the small disk, with inodes for so many files."""
    return _mounting_small_disk(folder, f"size={DISK_BYTES},nr_inodes={NUM_INODES}")


@functools.cache
def _find_reason_against_mounts() -> str:
    if os.geteuid():
        return "needs root, for mounts of the run's own"
    missing = [name for name in ("unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"needs {' and '.join(missing)} (util-linux)"
    # Root of a container may often not.
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return "needs the right to make a mount namespace (CAP_SYS_ADMIN)" if done.returncode else ""


@contextlib.contextmanager
def _unsharing_mounts(folder: Path) -> Iterator[tuple[str, ...]]:
    """What the run mounts, its own processes see and no others."""
    yield ("env", f"{OWN_MOUNTS_VARIABLE}=1", "unshare", "--mount", "--propagation", "private")


@contextlib.contextmanager
def _mounting_small_shared_memory(folder: Path) -> Iterator[tuple[str, ...]]:
    """The run gets a /dev/shm of its own, of 16 MiB."""
    with _unsharing_mounts(folder) as prefix:
        mount = f"mount -t tmpfs -o size={SHARED_MEMORY_BYTES} tmpfs /dev/shm"
        yield (*prefix, "sh", "-c", f'{mount} && exec "$@"', "sh")


def _find_reason_against_memory_limit() -> str:
    if os.geteuid():
        return "needs root, to limit the memory of a cgroup"
    if not os.access(_MEMORY_CGROUPS / "memory.limit_in_bytes", os.W_OK):
        return "needs cgroups of version 1 with the memory controller"
    return ""


@contextlib.contextmanager
def _limiting_memory(folder: Path) -> Iterator[tuple[str, ...]]:
    """The run gets a cgroup with 1 GiB, as one of a container."""
    cgroup = _MEMORY_CGROUPS / f"phalanx-drill-{os.getpid()}"
    cgroup.mkdir()
    try:
        (cgroup / "memory.limit_in_bytes").write_text(str(MEMORY_BYTES))
        yield ("sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh")
    finally:
        # All its processes have been waited for; the kernel may still be about to notice.
        with contextlib.suppress(OSError):
            cgroup.rmdir()


def _find_reason_against_cpu_quota() -> str:
    if os.geteuid():
        return "needs root, to limit the processors of a cgroup"
    if not os.access(_CPU_CGROUPS / "cpu.cfs_quota_us", os.R_OK):
        return "needs cgroups of version 1 with the cpu controller"
    return ""


@contextlib.contextmanager
def _making_cpu_quota(folder: Path) -> Iterator[tuple[str, ...]]:
    """The run learns of a cgroup whose processes get little of a processor; it is not in it."""
    cgroup = _CPU_CGROUPS / f"phalanx-drill-{os.getpid()}"
    cgroup.mkdir()
    try:
        (cgroup / "cpu.cfs_quota_us").write_text(str(CPU_QUOTA_US))
        yield ("env", f"{CPU_QUOTA_VARIABLE}={cgroup}")
    finally:
        # All its processes have been waited for; the kernel may still be about to notice.
        with contextlib.suppress(OSError):
            cgroup.rmdir()


def _find_reason_against_clock() -> str:
    return "" if shutil.which("cc") else "needs a C compiler (cc), for a clock of the run's own"


@contextlib.contextmanager
def _stepping_clock(folder: Path) -> Iterator[tuple[str, ...]]:
    """The run's processes get a wall clock that a fault can step."""
    folder.mkdir(parents=True)
    clock = SteppedClock.build(folder)
    yield ("env", *(f"{name}={value}" for name, value in clock.environment.items()))


def _find_reason_against_failing_disk() -> str:
    return "" if shutil.which("cc") else "needs a C compiler (cc), for a disk that fails"


@contextlib.contextmanager
def _failing_disk(folder: Path) -> Iterator[tuple[str, ...]]:
    """The run's processes get a disk that a fault can have fail."""
    folder.mkdir(parents=True)
    disk = FailingDisk.build(folder)
    yield ("env", *(f"{name}={value}" for name, value in disk.environment.items()))


def _find_reason_against_network() -> str:
    if os.geteuid():
        return "needs root, to make a network namespace"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"needs {' and '.join(missing)} (iproute2)" if missing else ""


def _find_reason_against_network_devices() -> str:
    if reason := _find_reason_against_network():
        return reason
    files = ("/dev/net/tun", "/proc/sys/net/ipv4/conf/all/accept_local")
    if missing := [file for file in files if not os.access(file, os.W_OK)]:
        return f"needs to write {' and '.join(missing)}, for a network device of the run's own"
    return ""


@contextlib.contextmanager
def _making_network(folder: Path) -> Iterator[tuple[str, ...]]:
    """The run gets a network of its own, in which there is nothing but its loopback device."""
    name = f"phalanx-drill-{os.getpid()}"
    _run_or_raise(["ip", "netns", "add", name], "no network namespace can be made")
    try:
        _run_or_raise(
            ["ip", "-n", name, "link", "set", "lo", "up"], "the network's device does not come up"
        )
        yield ("ip", "netns", "exec", name)
    finally:
        _run_quietly(["ip", "netns", "delete", name])


def _run_or_raise(command: Sequence[str], problem: str) -> None:
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise EnvironmentProblem(problem, why=done.stderr.strip())


def _run_quietly(command: Sequence[str]) -> None:
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


STAGES = {
    "small_disk": Stage(_find_reason_against_disk, _mounting_small_disk),
    "cpu_quota": Stage(_find_reason_against_cpu_quota, _making_cpu_quota),
    "few_inodes": Stage(_find_reason_against_disk, _mounting_disk_of_few_inodes),
    "own_mounts": Stage(_find_reason_against_mounts, _unsharing_mounts),
    "small_shared_memory": Stage(_find_reason_against_mounts, _mounting_small_shared_memory),
    "memory_limit": Stage(_find_reason_against_memory_limit, _limiting_memory),
    "own_network": Stage(_find_reason_against_network, _making_network),
    "own_network_with_devices": Stage(_find_reason_against_network_devices, _making_network),
    "stepped_clock": Stage(_find_reason_against_clock, _stepping_clock),
    "failing_disk": Stage(_find_reason_against_failing_disk, _failing_disk),
}
