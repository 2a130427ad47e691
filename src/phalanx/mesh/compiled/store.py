"""The folder in which compiled code is kept between runs.

Each entry is one file with its own checksum that appears whole: whoever reads it needs no lock, and
a run that is killed leaves nothing that another would take. Whatever is damaged, not this user's,
or writable by others is no entry. Code that is loaded from here runs: so the folder is this user's
alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from phalanx.core.files import SAFE_NAME_PATTERN, open_regular_file_descriptor

MAX_STORE_BYTES = 1 << 30
MAX_ENTRY_BYTES = 64 << 20
_MAGIC = b"phalanx compiled code 1 "
_HEADER_BYTES = len(_MAGIC) + 64 + 1
_WORK_PREFIX = "work-"
_NEW_PREFIX = "new-"
_TURN_PREFIX = "turn-"
_BEGUN_PREFIXES = (_NEW_PREFIX, _TURN_PREFIX)
# Longer than a process writes an entry.
_BEGUN_S = 600.0
_CHUNK_BYTES = 1 << 20


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

    @classmethod
    def open(cls, root: Path, max_bytes: int = MAX_STORE_BYTES) -> CodeStore:
        """The store in `root`, which is made where there is none. Raises StoreUnusableError."""
        try:
            root.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                root.mkdir(mode=0o700)
            found = os.lstat(root)
            if not stat.S_ISDIR(found.st_mode):
                raise StoreUnusableError(f"{root} is not a directory")
            if found.st_uid != os.geteuid():
                raise StoreUnusableError(f"{root} belongs to another user")
            if stat.S_IMODE(found.st_mode) != 0o700:
                os.chmod(root, 0o700)
            store = cls(root, max_bytes)
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
                found = os.fstat(file.fileno())
                if not _is_own(found) or found.st_size > MAX_ENTRY_BYTES + _HEADER_BYTES:
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
        """Keep the file at `path`, of the same file system, as `name` without a copy; returns its
        checksum, which the caller keeps in an entry. Raises OSError."""
        checksum = hash_file(path)
        partial = self.root / f"{_NEW_PREFIX}{os.getpid()}-{name}"
        os.chmod(path, 0o600)
        os.link(path, partial)
        os.replace(partial, self._path(name))
        # Where both were one file, the rename did nothing.
        partial.unlink(missing_ok=True)
        self._remove_least_used(keep=name)
        return checksum

    def link_file(self, name: str, path: Path, num_bytes: int, checksum: str | None) -> bool:
        """Give the kept file `name` another name `path`; False where it is not there, not this
        user's, or another one by its size and `checksum` (None: not looked at)."""
        kept = self._path(name)
        try:
            found = os.lstat(kept)
            if not (stat.S_ISREG(found.st_mode) and _is_own(found)) or found.st_size != num_bytes:
                return False
            if checksum is not None and hash_file(kept) != checksum:
                os.unlink(kept)
                return False
            path.unlink(missing_ok=True)
            os.link(kept, path)
            os.utime(kept)
        except OSError:
            return False
        return True

    @contextlib.contextmanager
    def making_work_folder(self) -> Iterator[Path]:
        """A new empty folder for this process, which is removed after the body, or by a later run
        if this process is killed."""
        folder, descriptor = self._make_locked_folder()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)

    def try_turn(self, name: str) -> CompileTurn | None:
        """The turn `name`, which one process at a time has; None while another one has it. Where
        files cannot be locked everybody has it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(self.root / f"{_TURN_PREFIX}{name}", flags, 0o600)
        except OSError:
            return CompileTurn(-1)
        if _try_to_lock(descriptor):
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

    def _make_locked_folder(self) -> tuple[Path, int]:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=self.root))
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                # Who removes leftovers may have come in between.
                if _try_to_lock(descriptor) and folder.exists():
                    return folder, descriptor
                os.close(descriptor)

    def _remove_leftovers(self) -> None:
        """Remove what killed processes began. Raises OSError where nothing can be written."""
        old_s = time.time() - _BEGUN_S
        with tempfile.TemporaryFile(dir=self.root):
            pass
        for path in self.root.iterdir():
            with contextlib.suppress(OSError):
                if path.name.startswith(_WORK_PREFIX):
                    _remove_unlocked_folder(path)
                elif path.name.startswith(_BEGUN_PREFIXES) and os.lstat(path).st_mtime < old_s:
                    path.unlink()

    def _remove_least_used(self, keep: str) -> None:
        entries = []
        for path in self.root.glob("code-*"):
            with contextlib.suppress(OSError):
                found = os.lstat(path)
                entries.append((found.st_mtime, found.st_size, path))
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
            os.close(self._descriptor)


def hash_file(path: Path) -> str:
    """SHA-256 of a file. Raises OSError."""
    hashed = hashlib.sha256()
    with open(open_regular_file_descriptor(path, os.O_RDONLY), "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hashed.update(chunk)
    return hashed.hexdigest()


def _make_header(data: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(data).hexdigest().encode() + b"\n"


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _remove_unlocked_folder(path: Path) -> None:
    """Remove a folder that no living process has. Raises OSError where locks do not tell."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _try_to_lock(descriptor: int) -> bool:
    """False if another process has the lock; True, too, where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
