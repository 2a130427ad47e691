"""The seam between what must survive a crash and the file system: every change that durability
depends on goes here.

Tests hand in one that records, fails, or dies at its k-th operation.
"""

from __future__ import annotations

import io
import json
import os
import stat
from pathlib import Path
from typing import Any, Protocol

from phalanx.core.files import CREATE_FLAGS, fsync_directory, open_regular_file_descriptor

_COPY_BUFFER_BYTES = 1 << 20


class DiskFile(Protocol):
    """A file that is being written. What was written is durable after `sync`."""

    def write(self, data: bytes | memoryview) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class Disk:
    """The real file system. Every method raises OSError."""

    def make_directory(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> DiskFile:
        """A new file, or an old one emptied: never a pipe, and never what a link leads to."""
        return _DurableFile(path)

    def rename(self, old: Path, new: Path) -> None:
        """Atomic; a file at `new` is replaced."""
        os.rename(old, new)

    def link(self, existing: Path, new: Path) -> None:
        os.link(existing, new)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        """An empty one."""
        os.rmdir(path)

    def sync_directory(self, path: Path) -> None:
        """Make durable which names are in it."""
        fsync_directory(path)


class _DurableFile:
    def __init__(self, path: Path) -> None:
        fd = open_regular_file_descriptor(path, CREATE_FLAGS)
        self._file = io.BufferedWriter(io.FileIO(fd, "w"), _COPY_BUFFER_BYTES)

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)

    def sync(self) -> None:
        # Python's buffer first: fsync sees only what the kernel has.
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """The file is closed even if what is buffered cannot be written any more, which raises."""
        self._file.close()


def make_directories(disk: Disk, path: Path) -> None:
    """Create `path` and what is missing above it, durably."""
    if path.is_dir():
        return
    make_directories(disk, path.parent)
    disk.make_directory(path)
    # A name is durable when the directory that holds it is.
    disk.sync_directory(path.parent)


def remove_tree(disk: Disk, path: Path) -> None:
    """Remove a directory and what is in it, or what else has that name; nothing if it is not there.

    Raises OSError.

    Of a link only the link goes: what it leads to is somebody else's.
    """
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            disk.remove(path)
            return
        # Sorted, so that a test that fails the k-th operation fails the same one each time.
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(disk, Path(entry.path))
        else:
            disk.remove(Path(entry.path))
    disk.remove_directory(path)


def write_bytes_durably(disk: Disk, path: Path, data: bytes) -> None:
    """Replace or create `path` as a whole: a reader, also after a crash, sees the old file or the
    new one.

    One process at a time may do it: what a killed one left beside `path` is removed. Raises
    OSError; nothing is left then.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        if os.path.lexists(partial):
            disk.remove(partial)
        file = disk.create(partial)
        try:
            file.write(data)
            file.sync()
        finally:
            file.close()
        # The bytes are durable before the name leads to them.
        disk.rename(partial, path)
    except BaseException:
        if _is_file(partial):
            disk.remove(partial)
        raise
    disk.sync_directory(path.parent)


def write_json_durably(disk: Disk, path: Path, value: Any) -> None:
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    write_bytes_durably(disk, path, text.encode())


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False
