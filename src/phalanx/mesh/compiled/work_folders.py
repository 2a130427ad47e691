"""Folders in which processes compile, one for each. Who is killed leaves his; a later process
removes it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from phalanx.core.black_box import read_boot_id
from phalanx.core.digest import digest

# Network file systems lock no directories for other hosts, so that a lock says nothing of a process
# there. What it made is removed when it has surely compiled.
OTHER_HOSTS_WORK_S = 14 * 24 * 3600.0


class WorkFolders:
    """The folders in `parent` whose names begin with `prefix`: a living process has its own locked.

    `host` is what the names of this host's have in common, until it starts again.
    """

    def __init__(self, parent: Path, prefix: str, host: str = "") -> None:
        self._parent, self._prefix = parent, prefix
        self._own_prefix = f"{prefix}{host or identify_host()}-"

    @contextlib.contextmanager
    def making(self) -> Iterator[Path]:
        """A new empty folder for this process, which is removed after the body, or by a later
        process if this one is killed."""
        folder, descriptor = self._make_locked()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)

    def remove_abandoned(self) -> None:
        """Remove this user's folders that no living process of this host has, and those of other
        hosts that are older than OTHER_HOSTS_WORK_S."""
        old_s = time.time() - OTHER_HOSTS_WORK_S
        for path in self._parent.glob(f"{self._prefix}*"):
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                    continue
                if path.name.startswith(self._own_prefix) or status.st_mtime < old_s:
                    _remove_if_unlocked(path)

    def _make_locked(self) -> tuple[Path, int]:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=self._own_prefix, dir=self._parent))
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                # Who removes abandoned ones may have come in between.
                if try_to_lock(descriptor) and folder.exists():
                    return folder, descriptor
                os.close(descriptor)


def identify_host() -> str:
    """Hexadecimal digits that differ between hosts, and between two boots of one."""
    return digest([socket.gethostname(), read_boot_id()])[:12]


def try_to_lock(descriptor: int) -> bool:
    """False if another process has the lock; True, too, where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _remove_if_unlocked(path: Path) -> None:
    """Remove a folder that no living process has. Raises OSError where locks do not tell."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)
