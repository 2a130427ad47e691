"""The folder in which compiled code is kept between runs.

Each entry is one file with its own checksum that appears whole: whoever reads it needs no lock, and
a run that is killed leaves nothing that another would take. Whatever is damaged, not this user's,
or writable by others is no entry. Code that is loaded from here runs, and by its path: so the
folder is this user's alone, and nobody else may rename it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.core.files import SAFE_NAME_PATTERN, open_regular_file_descriptor
from phalanx.mesh.compiled.safe_path import find_why_unsafe, make_private_parents
from phalanx.mesh.compiled.work_folders import WorkFolders, try_to_lock

MAX_STORE_BYTES = 1 << 30
MAX_ENTRY_BYTES = 64 << 20
# The header of 150 MB, and what compilers write beside it: one that finds no room fails the run.
MIN_FREE_BYTES = 256 << 20
_MAGIC = b"phalanx compiled code 1 "
_HEADER_BYTES = len(_MAGIC) + 64 + 1
_WORK_PREFIX = "work-"
_NEW_PREFIX = "new-"
_TURN_PREFIX = "turn-"
_BEGUN_PREFIXES = (_NEW_PREFIX, _TURN_PREFIX)
# Longer than a process writes an entry.
_BEGUN_S = 600.0
_CHUNK_BYTES = 1 << 20
_MERGE_LOCK = "merging.lock"
# Reading and writing an entry takes a fraction of a second.
MERGE_LIMIT_S = 30.0
TURN_POLL_INTERVAL_S = 0.02
# Of another file system, or of one that has no links.
_NO_LINK_ERRORS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class StoreUnusableError(Exception):
    """The folder cannot be used; the text says why."""


def find_store_root() -> Path:
    """The folder of this user's compiled code: in XDG_CACHE_HOME, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative one is to be ignored, by its specification.
    folder = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))
    return folder / "phalanx" / "compiled"


class CodeStore:
    """Entries by name in one folder of this user's."""

    def __init__(self, root: Path, max_bytes: int = MAX_STORE_BYTES) -> None:
        self.root, self._max_bytes = root, max_bytes
        self.work_folders = WorkFolders(root, _WORK_PREFIX)

    @classmethod
    def open(cls, root: Path, max_bytes: int = MAX_STORE_BYTES) -> CodeStore:
        """The store in `root`, which is made where there is none. Raises StoreUnusableError."""
        if not root.is_absolute():
            # Not the working directory of whoever starts a run: it may be anybody's.
            raise StoreUnusableError("this user has no home directory (XDG_CACHE_HOME is not set)")
        try:
            make_private_parents(root)
            if why := find_why_unsafe(root.parent):
                raise StoreUnusableError(why)
            with contextlib.suppress(FileExistsError):
                root.mkdir(mode=0o700)
            root_stat = os.lstat(root)
            if not stat.S_ISDIR(root_stat.st_mode):
                raise StoreUnusableError(f"{root} is not a directory")
            if root_stat.st_uid != os.geteuid():
                raise StoreUnusableError(f"{root} belongs to another user")
            if stat.S_IMODE(root_stat.st_mode) != 0o700:
                os.chmod(root, 0o700)
            store = cls(root, max_bytes)
            status = os.statvfs(root)
            if status.f_bavail * status.f_frsize < MIN_FREE_BYTES:
                raise StoreUnusableError(f"{root} has less than 256 MiB free")
            # Also what says that the disk is read-only.
            store._remove_leftovers()
        except OSError as error:
            raise StoreUnusableError(f"{root}: {error.strerror or error}") from None
        return store

    def read(self, name: str) -> bytes | None:
        """The entry `name`; None where there is none that is whole and this user's. It counts as
        used now."""
        path = self._path(name)
        try:
            with open(
                open_regular_file_descriptor(path, os.O_RDONLY | os.O_NOFOLLOW), "rb"
            ) as file:
                entry_stat = os.fstat(file.fileno())
                if not _is_own(entry_stat) or entry_stat.st_size > MAX_ENTRY_BYTES + _HEADER_BYTES:
                    return None
                header, data = file.read(_HEADER_BYTES), file.read()
        except OSError:
            return None
        if header != _make_header(data):
            # Not while another one is being put there: that has another name until it is whole.
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return data

    def find_version(self, name: str) -> str:
        """What differs between two contents of the entry `name`; empty where there is none."""
        with contextlib.suppress(OSError):
            descriptor = open_regular_file_descriptor(self._path(name), os.O_RDONLY | os.O_NOFOLLOW)
            with open(descriptor, "rb") as file:
                return file.read(_HEADER_BYTES).hex()
        return ""

    def write(self, name: str, data: bytes) -> None:
        """Put `data` there as the entry `name`, whole or not at all, and remove the entries that
        were used longest ago where there are too many bytes. Raises OSError."""
        if len(data) > MAX_ENTRY_BYTES:
            raise OSError(f"{len(data):,} bytes are more than an entry may have")
        # Readable by this user alone.
        descriptor, partial = tempfile.mkstemp(prefix=_NEW_PREFIX, dir=self.root)
        try:
            with open(descriptor, "wb") as file:
                file.write(_make_header(data))
                file.write(data)
            os.replace(partial, self._path(name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
        self._remove_least_used(keep=name)

    def keep_file(self, name: str, path: Path) -> str:
        """Keep the file at `path` as `name`, without a copy where the file system can; returns its
        checksum, which the caller keeps in an entry. Raises OSError."""
        checksum = hash_file(path)
        partial = self.root / f"{_NEW_PREFIX}{os.getpid()}-{name}"
        os.chmod(path, 0o600)
        try:
            _link_or_copy(path, partial)
            # Not always read again before it is used, as entries are: a power cut must leave no
            # zeros under the name.
            _sync_file(partial)
            os.replace(partial, self._path(name))
        finally:
            # Where both were one file, the rename did nothing.
            partial.unlink(missing_ok=True)
        self._remove_least_used(keep=name)
        return checksum

    def link_file(self, name: str, path: Path, num_bytes: int, checksum: str | None) -> bool:
        """Give the kept file `name` another name `path`; False where it is not there, not this
        user's, or another one by its size and `checksum` (None: not looked at)."""
        entry = self._path(name)
        try:
            entry_stat = os.lstat(entry)
            if (
                not (stat.S_ISREG(entry_stat.st_mode) and _is_own(entry_stat))
                or entry_stat.st_size != num_bytes
            ):
                return False
            if checksum is not None and hash_file(entry) != checksum:
                os.unlink(entry)
                return False
            path.unlink(missing_ok=True)
            _link_or_copy(entry, path)
            os.utime(entry)
        except OSError:
            return False
        return True

    def remove_file(self, name: str) -> None:
        """Remove the kept file `name`, which is damaged."""
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    @contextlib.contextmanager
    def merging(self) -> Iterator[None]:
        """Keep other processes from merging what they have into an entry, during the body; not so
        after MERGE_LIMIT_S of waiting, or where files cannot be locked."""
        # Not a turn: its file would be removed while others wait for it.
        turn = self._await(lambda: self._try_to_lock_file(_MERGE_LOCK), MERGE_LIMIT_S)
        try:
            yield
        finally:
            if turn is not None:
                turn.end()

    def await_turn(self, name: str, limit_s: float) -> CompileTurn | None:
        """The turn `name` as soon as no other process has it; None after `limit_s` seconds."""
        return self._await(lambda: self.try_turn(name), limit_s)

    def _await(
        self, try_once: Callable[[], CompileTurn | None], limit_s: float
    ) -> CompileTurn | None:
        end_s = time.monotonic() + limit_s
        while (turn := try_once()) is None and time.monotonic() < end_s:
            time.sleep(TURN_POLL_INTERVAL_S)
        return turn

    def try_turn(self, name: str) -> CompileTurn | None:
        """The turn `name`, which one process at a time has; None while another one has it. Where
        files cannot be locked everybody has it."""
        return self._try_to_lock_file(f"{_TURN_PREFIX}{name}")

    def _try_to_lock_file(self, name: str) -> CompileTurn | None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(self.root / name, flags, 0o600)
        except OSError:
            return CompileTurn(-1)
        if try_to_lock(descriptor):
            return CompileTurn(descriptor)
        os.close(descriptor)
        return None

    def end_turns(self, name: str) -> None:
        """Nobody takes the turn `name` any more: remove its file."""
        with contextlib.suppress(OSError):
            os.unlink(self.root / f"{_TURN_PREFIX}{name}")

    def _path(self, name: str) -> Path:
        assert SAFE_NAME_PATTERN.fullmatch(name), name
        return self.root / f"code-{name}"

    def _remove_leftovers(self) -> None:
        """Remove what killed processes began. Raises OSError where nothing can be written."""
        old_s = time.time() - _BEGUN_S
        with tempfile.TemporaryFile(dir=self.root):
            pass
        self.work_folders.remove_abandoned()
        for path in self.root.iterdir():
            with contextlib.suppress(OSError):
                if path.name.startswith(_BEGUN_PREFIXES) and os.lstat(path).st_mtime < old_s:
                    path.unlink()

    def _remove_least_used(self, keep: str) -> None:
        entries = []
        for path in self.root.glob("code-*"):
            with contextlib.suppress(OSError):
                entry_stat = os.lstat(path)
                entries.append((entry_stat.st_mtime, entry_stat.st_size, path))
        num_bytes = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if num_bytes <= self._max_bytes:
                return
            if path == self._path(keep):
                continue
            # Whoever has it open, or linked, keeps it.
            with contextlib.suppress(OSError):
                os.unlink(path)
                num_bytes -= size


class CompileTurn:
    """A turn that this process has until it ends it, or dies."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def end(self) -> None:
        """Let the next one have it."""
        if self._descriptor >= 0:
            # A child that was forked meanwhile has the same lock: closing would leave it locked.
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1


def hash_file(path: Path) -> str:
    """SHA-256 of a file. Raises OSError."""
    hashed = hashlib.sha256()
    with open(open_regular_file_descriptor(path, os.O_RDONLY), "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hashed.update(chunk)
    return hashed.hexdigest()


def _link_or_copy(source: Path, target: Path) -> None:
    """Raises OSError."""
    try:
        os.link(source, target)
        return
    except OSError as error:
        if error.errno not in _NO_LINK_ERRORS:
            raise
    partial = target.with_name(f"{target.name}.partial")
    try:
        shutil.copyfile(source, partial)
        os.chmod(partial, 0o600)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _sync_file(path: Path) -> None:
    descriptor = open_regular_file_descriptor(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_header(data: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(data).hexdigest().encode() + b"\n"


def _is_own(entry_stat: os.stat_result) -> bool:
    return entry_stat.st_uid == os.geteuid() and not entry_stat.st_mode & 0o022
