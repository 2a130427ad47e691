"""The lock of a run directory: two live jobs never write into one, and a dead job never keeps
another one out.

`RUN/lock` says who holds it; an flock on that file says that the holder lives. Whoever has the
flock on the file that the path leads to owns the directory, so two jobs that race for it, or for
the remains of a dead one, cannot both win. The text is for people, and for file systems without
flock: there process id, start time and boot decide.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from phalanx.checkpoint.ownership.fencing_token import (
    FencingToken,
    find_removal_of_run,
    mend_fencing_token,
    write_next_fencing_token,
)
from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import PhalanxError, RunLockedError
from phalanx.core.file_locks import try_to_lock_file
from phalanx.core.files import open_regular_file_descriptor
from phalanx.core.process_stat import read_process_stat_or_raise

LOCK_FILE_NAME = "lock"
# For another job that is taking or giving up the lock at this very moment.
_LOCK_WAIT_S = 0.5
_LOCK_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "host": (str,),
    "pid": (int,),
    "start_time": (int, float),
    "boot_id": (str,),
    "since_unix_s": (int, float),
    "epoch": (int,),
}

HolderState = Literal["alive", "gone", "unseen", "hidden"]


@dataclass(frozen=True)
class LockHolder:
    """A process on a machine. `start_time` tells it from a later one with the same id."""

    host: str
    pid: int
    start_time: float
    boot_id: str
    since_unix_s: float
    epoch: int = 0

    def is_held_by_same_job(self, other: LockHolder) -> bool:
        """True for two texts of one lock: it is written again for each attempt."""
        return replace(self, epoch=0) == replace(other, epoch=0)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_unix_s))
        text = f"process {self.pid} on {self.host} since {since}"
        if self.epoch:
            text += f" (epoch {self.epoch})"
        return text


@dataclass(frozen=True)
class RunLock:
    """A lock we hold. `reclaimed_from`: the dead job that had left it, if one had."""

    path: Path
    holder: LockHolder
    fd: int
    reclaimed_from: LockHolder | None = None

    def is_ours(self) -> bool:
        """False once the lock was removed by hand, or another job took the run; or where that
        cannot be seen."""
        try:
            return _is_lock_still_ours(self)
        except OSError:
            return False

    def require_lock_still_ours(self) -> None:
        """Raise RunLockedError if the lock was taken from us, RunRemovedError if its directory
        is gone."""
        if not _is_lock_still_ours(self):
            run_dir = self.path.parent
            removal = find_removal_of_run(run_dir)
            if removal is not None and not run_dir.exists():
                raise removal
            raise _run_locked_error(self.path, read_lock_holder(self.path))

    def acquire_token_for_attempt(self) -> FencingToken:
        """Claim the run for another attempt: writes of older attempts are refused from now on.

        Raises RunLockedError if the lock was taken from us by hand, RunRemovedError if its
        directory is gone, ResourceError if that cannot be written.
        """
        self.require_lock_still_ours()
        known = read_locked_epoch(self.path.parent)
        if not known and self.reclaimed_from is not None:
            known = self.reclaimed_from.epoch
        token = write_next_fencing_token(self.path.parent, taker=str(self.holder), if_damaged=known)
        try:
            _write_lock_holder(self.fd, replace(self.holder, epoch=token.number))
        except OSError as error:
            raise build_path_resource_error(error, "locking the run directory", self.path) from None
        return token


@contextmanager
def holding_run_lock(run_dir: Path) -> Iterator[RunLock]:
    """Hold `run_dir` (which exists) for this process.

    Raises RunLockedError (exit 9) naming the holder if another job lives, or may live on another
    host; ResourceError if the directory cannot be written.
    """
    path = run_dir / LOCK_FILE_NAME
    try:
        lock = _acquire_run_lock(path)
    except OSError as error:
        raise build_path_resource_error(error, "locking the run directory", path) from None
    try:
        yield lock
    finally:
        _mend_token_of_run(lock)
        _release_run_lock(lock)


def read_locked_epoch(run_dir: Path) -> int:
    """The number of the newest fencing token, as the lock of the job that has the run names it; 0
    where it names none."""
    holder = read_lock_holder(run_dir / LOCK_FILE_NAME)
    if holder is None:
        return 0
    return holder.epoch


def _mend_token_of_run(lock: RunLock) -> None:
    """Write the run's epoch again if someone has emptied its file while this job had the run: the
    next job counts on from it."""
    run_dir = lock.path.parent
    epoch = read_locked_epoch(run_dir)
    if epoch and lock.is_ours():
        # The next job says what is wrong with it.
        with suppress(PhalanxError, OSError):
            mend_fencing_token(run_dir, epoch, taker=str(lock.holder))


def refuse_run_of_live_job(run_dir: Path) -> None:
    """Raise RunLockedError if the lock of `run_dir` names another live job.

    Changes nothing, and promises nothing: a job that passes still has to take the lock.
    """
    holder = find_live_holder(run_dir)
    if holder is not None:
        raise _run_locked_error(run_dir / LOCK_FILE_NAME, holder)


def find_live_holder(run_dir: Path) -> LockHolder | None:
    """The job that has `run_dir`; None if none has, or its process is gone.

    One that cannot be seen from here, as that of another machine, counts as alive. Not so one that
    is "hidden": a number of a process alone keeps nobody out, and whether it holds the flock shows
    when the lock is taken.
    """
    holder = read_lock_holder(run_dir / LOCK_FILE_NAME)
    if holder is None or look_for_holder_process(holder) in ("gone", "hidden"):
        return None
    return holder


def look_for_holder_process(holder: LockHolder) -> HolderState:
    """Whether the holder's process lives. "unseen": it is of another machine, or /proc refuses to
    tell. "hidden": a process of another user has its number, and /proc shows none of these (the
    mount option hidepid)."""
    if holder.host != socket.gethostname():
        return "unseen"
    try:
        if not _is_holder_process_dead(holder):
            return "alive"
    except OSError:
        return "unseen"
    # Where processes are hidden, /proc answers as if there were none; signals do not.
    is_hidden = holder.boot_id == _read_boot_id() and _is_process_hidden(holder.pid)
    return "hidden" if is_hidden else "gone"


def _acquire_run_lock(path: Path) -> RunLock:
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        # Without O_EXCL: a dead job leaves its file, and the first to flock it takes it over.
        fd = open_regular_file_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            # Without waiting: the holder may keep it for days.
            locked = try_to_lock_file(fd)
            # Between open and flock its holder may have removed the file: then another one counts.
            if locked and _is_path_of_open_file(path, fd):
                earlier = _read_lock_holder_of_open_file(fd)
                if earlier is None or _is_holder_process_dead(earlier):
                    lock = RunLock(
                        path, _describe_this_process_as_holder(), fd, reclaimed_from=earlier
                    )
                    _write_lock_holder(fd, lock.holder)
                    return lock
                # It lives, or cannot be seen from here: where flock does nothing, the text decides.
                raise _run_locked_error(path, earlier)
            if not locked:
                holder = _read_lock_holder_of_open_file(fd)
                # A dead holder's lock in use: another job is reclaiming it, and will have written
                # its name in a moment.
                is_settled = holder is not None and not _is_holder_process_dead(holder)
                if is_settled or time.monotonic() > deadline:
                    raise _run_locked_error(path, holder)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        time.sleep(0.01)


def _release_run_lock(lock: RunLock) -> None:
    """Remove the lock if it is still ours: it may have been removed by hand, and another job may
    have taken it since."""
    # Removed while it is still locked: once it is closed, another job may hold the same file.
    try:
        if _is_lock_still_ours(lock):
            lock.path.unlink()
    except OSError:
        pass
    finally:
        os.close(lock.fd)


def _is_lock_still_ours(lock: RunLock) -> bool:
    if not _is_path_of_open_file(lock.path, lock.fd):
        return False
    holder = _read_lock_holder_of_open_file(lock.fd)
    # A text that was cut or overwritten names nobody. Another job would have written its own.
    return holder is None or holder.is_held_by_same_job(lock.holder)


def read_lock_holder(path: Path) -> LockHolder | None:
    """The holder that a lock names; None if there is no lock, or if it names none."""
    # Without waiting, should the name be that of a pipe.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return _read_lock_holder_of_open_file(fd)
    finally:
        os.close(fd)


def _is_path_of_open_file(path: Path, fd: int) -> bool:
    """True if `path` still leads to the open file, which its holder may have removed between
    open and flock."""
    try:
        by_path, by_fd = os.stat(path), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (by_path.st_dev, by_path.st_ino) == (by_fd.st_dev, by_fd.st_ino)


def _read_lock_holder_of_open_file(fd: int) -> LockHolder | None:
    """The holder that an open lock file names.

    None for an empty or torn file, whose writer did not live to hold it, and for content that no
    job writes: a holder must be fit to be compared with and shown to people.
    """
    try:
        holder = LockHolder(**json.loads(os.pread(fd, 4096, 0)))
        if _is_valid_lock_holder(holder):
            return holder
    except (ValueError, TypeError, OverflowError, OSError, RecursionError):
        pass
    return None


def _is_valid_lock_holder(holder: LockHolder) -> bool:
    """True if a job may have written `holder`. Raises ValueError or OverflowError for a time that
    is none."""
    for name, types in _LOCK_FIELD_TYPES.items():
        if type(getattr(holder, name)) not in types:
            return False
    return 0 < holder.pid < 2**31 and str(holder).isprintable()


def _write_lock_holder(fd: int, holder: LockHolder) -> None:
    text = json.dumps(asdict(holder), sort_keys=True).encode() + b"\n"
    # In place, through the locked file: a rename would put another file, unlocked, there.
    os.pwrite(fd, text, 0)
    os.ftruncate(fd, len(text))
    os.fsync(fd)


def _is_holder_process_dead(holder: LockHolder) -> bool:
    """True if the holder's process is gone, as far as this machine can know it."""
    # Processes of another machine cannot be seen from here: it may live.
    if holder.host != socket.gethostname():
        return False
    # After a reboot its process id and start time may be those of another process.
    if holder.boot_id != _read_boot_id():
        return True
    return _read_process_start_time(holder.pid) != holder.start_time


def _is_process_hidden(pid: int) -> bool:
    """True if there is a process `pid` that /proc does not show to this user."""
    if Path(f"/proc/{pid}").exists():
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _run_locked_error(path: Path, holder: LockHolder | None) -> RunLockedError:
    if holder is None:
        return RunLockedError(
            "another job is taking this run directory", where=str(path.parent), fix="try again"
        )
    if holder.host == socket.gethostname():
        fix = "wait for it, stop it, or choose another run.dir"
    else:
        fix = f"if that job is known to be gone, remove {path}"
    return RunLockedError(
        f"the run directory is in use by {holder}", where=str(path.parent), fix=fix
    )


def _describe_this_process_as_holder() -> LockHolder:
    pid = os.getpid()
    start_time = _read_process_start_time(pid)
    assert start_time is not None
    return LockHolder(socket.gethostname(), pid, start_time, _read_boot_id(), round(time.time(), 3))


def _read_process_start_time(pid: int) -> float | None:
    """The time a process started: clock ticks since boot on Linux, else Unix seconds.

    None if there is no such process. Raises OSError where that cannot be told.
    """
    stat = read_process_stat_or_raise(pid)
    if stat is not None:
        # Of one that has ended the locks are gone.
        return None if stat.has_ended else float(stat.start_ticks)
    if Path("/proc/self/stat").exists():
        return None
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import psutil

        return str(round(psutil.boot_time()))
