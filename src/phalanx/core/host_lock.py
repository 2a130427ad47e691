"""A lock that processes of one user take in turn on one machine, for what would need too much
memory if all did it at once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.core.errors import EnvironmentProblem
from phalanx.core.file_locks import try_to_lock_file
from phalanx.core.places import find_temporary_directory

POLL_INTERVAL_S = 0.05


@contextmanager
def holding_host_lock(
    name: str, timeout_s: float, *, directory: Path | None = None
) -> Iterator[None]:
    """Hold the lock `name` of this user on this machine; the kernel lets it go if the process dies.

    Waits as long as owners change or end. Raises EnvironmentProblem (exit 6) that names the owner
    if one process has held it for `timeout_s`, and ResourceError where no temporary file can be
    made. An owner that is gone, but left the lock to a child, has lost it. `directory`: where the
    lock's file lies, else the directory for temporary files; where files cannot be locked, nobody
    waits.
    """
    path = (directory or find_temporary_directory()) / f"phalanx-{os.getuid()}-{name}.lock"
    descriptor = _wait_for_lock(path, timeout_s)
    try:
        yield
    finally:
        # Closing it lets it go. The file stays: removing it would let two processes in.
        os.close(descriptor)


def _wait_for_lock(path: Path, timeout_s: float) -> int:
    """A descriptor of the locked file, with this process's number in it."""
    owner, since_s = 0, time.monotonic()
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if try_to_lock_file(descriptor) and _is_file_at(path, descriptor):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {_read_pid_namespace()}".encode(), 0)
            return descriptor
        holder, namespace = _read_owner(descriptor)
        os.close(descriptor)
        if holder != owner:
            owner, since_s = holder, time.monotonic()
        is_visible = bool(namespace) and namespace == _read_pid_namespace()
        if holder and is_visible and not Path(f"/proc/{holder}").exists():
            # A child that outlives it has its descriptor: whoever comes now gets another file.
            path.unlink(missing_ok=True)
        elif time.monotonic() - since_s > timeout_s:
            raise EnvironmentProblem(
                f"process {holder or 'unknown'} has held {path} for {timeout_s:g} s, and this one"
                " waits for its turn",
                fix=f"end process {holder}" if holder else f"remove {path}",
            )
        time.sleep(POLL_INTERVAL_S)


def _is_file_at(path: Path, descriptor: int) -> bool:
    """False if the file was removed while this process waited for it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read_owner(descriptor: int) -> tuple[int, str]:
    """The number of the process that holds the lock, and the namespace that it is one of; 0 while
    it has not written them yet."""
    number, _, namespace = os.pread(descriptor, 128, 0).decode(errors="replace").partition(" ")
    return (int(number), namespace) if number.isdecimal() else (0, "")


def _read_pid_namespace() -> str:
    """The name of the namespace that numbers this process; empty where the system has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
