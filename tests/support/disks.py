"""Disks that fail where a test wants it: one that dies at its k-th operation, one that is full, one
that loses power.

Everything that checkpoints change on a file system goes through `phalanx.core.disk.Disk`; each call
of it is one operation here, so the places to fail are counted, not listed.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.core.disk import Disk, DiskFile


class Died(BaseException):
    """The process is gone. No handler of it runs to any effect: the disk does nothing any more."""


class CountingDisk(Disk):
    """Counts operations and shows each to `before`: number (from 1), name, path.

    What that raises is what happens.
    """

    def __init__(
        self, before: Callable[[int, str, Path], None] = lambda number, name, path: None
    ) -> None:
        self.num_operations = 0
        self._before = before

    def step(self, name: str, path: Path) -> None:
        self.num_operations += 1
        self._before(self.num_operations, name, path)

    def make_directory(self, path: Path) -> None:
        self.step("make_directory", path)
        super().make_directory(path)

    def create(self, path: Path) -> DiskFile:
        self.step("create", path)
        return CountedFile(self, path)

    def rename(self, old: Path, new: Path) -> None:
        self.step("rename", new)
        super().rename(old, new)

    def link(self, existing: Path, new: Path) -> None:
        self.step("link", new)
        super().link(existing, new)

    def remove(self, path: Path) -> None:
        self.step("remove", path)
        super().remove(path)

    def remove_directory(self, path: Path) -> None:
        self.step("remove_directory", path)
        super().remove_directory(path)

    def sync_directory(self, path: Path) -> None:
        self.step("sync_directory", path)
        super().sync_directory(path)


class CountedFile:
    """Written without a buffer: what was written before a death is on the disk, and nothing
    after it."""

    def __init__(self, disk: CountingDisk, path: Path) -> None:
        self._disk, self._path = disk, path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def write(self, data: bytes | memoryview) -> None:
        try:
            self._disk.step("write", self._path)
        except (Died, OSError):
            if getattr(self._disk, "tears", False):  # a part of it arrived
                os.write(self._fd, memoryview(data)[: len(data) // 2])
            raise
        os.write(self._fd, data)

    def sync(self) -> None:
        self._disk.step("sync", self._path)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class DyingDisk(CountingDisk):
    """Dies instead of its k-th operation; `tears`: in the middle of it, if it is a write.

    All later ones do nothing.
    """

    def __init__(self, dies_at: int, *, tears: bool = False) -> None:
        super().__init__()
        self._dies_at, self.tears = dies_at, tears

    def step(self, name: str, path: Path) -> None:
        self.num_operations += 1
        if self.num_operations >= self._dies_at:
            self.tears = self.tears and self.num_operations == self._dies_at
            raise Died(f"{name} {path.name}")


class FailingDisk(CountingDisk):
    """The k-th operation raises OSError `code`.

    If it `lasts`, so does whatever would need space from then on.
    """

    NEED_SPACE = ("make_directory", "create", "write", "sync", "link")
    tears = True

    def __init__(self, fails_at: int, code: int, *, lasts: bool) -> None:
        super().__init__()
        self._fails_at, self._code, self._lasts = fails_at, code, lasts
        self.failed = ""

    def step(self, name: str, path: Path) -> None:
        self.num_operations += 1
        is_later = self._lasts and self.num_operations > self._fails_at and name in self.NEED_SPACE
        if self.num_operations == self._fails_at or is_later:
            self.failed = self.failed or f"{name} {path.name}"
            raise OSError(self._code, os.strerror(self._code), str(path))


# Power loss


@dataclass
class File:
    """`synced` is what its last sync made durable, None if there was none."""

    data: bytes = b""
    synced: bytes | None = None


@dataclass
class Directory:
    """`durable` are the names its last sync saw; `pending` what happened to them since: name ->
    what it leads to."""

    durable: dict[str, File | Directory] = field(default_factory=dict)
    pending: list[dict[str, File | Directory | None]] = field(default_factory=list)
    now: dict[str, File | Directory] = field(default_factory=dict)

    def change(self, update: dict[str, File | Directory | None]) -> None:
        self.pending.append(update)
        self.now = _changed(self.now, update)


def _changed(
    names: dict[str, File | Directory], update: dict[str, File | Directory | None]
) -> dict[str, File | Directory]:
    changed = {**names, **{name: node for name, node in update.items() if node is not None}}
    return {name: node for name, node in changed.items() if update.get(name, node) is not None}


class PoweredDisk(DyingDisk):
    """Does everything, and remembers what of it a disk is bound to hold when the power goes at the
    k-th operation.

    `root` and what is in it are durable to begin with.
    """

    def __init__(self, root: Path, loses_power_at: int) -> None:
        super().__init__(loses_power_at)
        self._root = root
        self.tree = self._read(root)

    def _read(self, path: Path) -> Directory:
        names: dict[str, File | Directory] = {}
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            data = None if entry.is_dir() else Path(entry.path).read_bytes()
            names[entry.name] = self._read(Path(entry.path)) if data is None else File(data, data)
        return Directory(dict(names), [], dict(names))

    def _directory(self, path: Path) -> Directory:
        node: File | Directory = self.tree
        for part in path.relative_to(self._root).parts:
            assert isinstance(node, Directory)
            node = node.now[part]
        assert isinstance(node, Directory)
        return node

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self._directory(path.parent).change({path.name: Directory()})

    def create(self, path: Path) -> DiskFile:
        written = super().create(path)
        node = File()
        self._directory(path.parent).change({path.name: node})
        return _PoweredFile(written, node)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        assert old.parent == new.parent, "two directories cannot be synced as one"
        parent = self._directory(old.parent)
        parent.change({old.name: None, new.name: parent.now[old.name]})

    def link(self, existing: Path, new: Path) -> None:
        super().link(existing, new)
        self._directory(new.parent).change(
            {new.name: self._directory(existing.parent).now[existing.name]}
        )

    def remove(self, path: Path) -> None:
        super().remove(path)
        self._directory(path.parent).change({path.name: None})

    def remove_directory(self, path: Path) -> None:
        super().remove_directory(path)
        self._directory(path.parent).change({path.name: None})

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        directory = self._directory(path)
        directory.durable, directory.pending = dict(directory.now), []

    def after_power_loss(self, target: Path, dice: random.Random) -> None:
        """Write what the disk may hold into `target`: of names that were not synced any subset of
        the changes; of data that was not synced nothing, a part, zeros, or all.

        Subsets are reorderings, too: changes of different names commute, and of one name the last
        one left counts.
        """
        target.mkdir()
        self._restore(self.tree, target, dice, set())

    def _restore(
        self, directory: Directory, target: Path, dice: random.Random, seen: set[int]
    ) -> None:
        names = dict(directory.durable)
        for update in directory.pending:
            if dice.random() < 0.5:
                names = _changed(names, update)
        entries = sorted(names.items())
        dice.shuffle(entries)
        for name, node in entries:
            if isinstance(node, Directory):
                if id(node) in seen:  # a directory never has two names
                    continue
                seen.add(id(node))
                (target / name).mkdir()
                self._restore(node, target / name, dice, seen)
            else:
                (target / name).write_bytes(_what_is_left(node, dice))


def _what_is_left(node: File, dice: random.Random) -> bytes:
    if node.synced == node.data:
        return node.data
    length = dice.randint(0, len(node.data))
    return dice.choice(
        [node.synced or b"", node.data[:length], bytes(len(node.data)), node.data, b""]
    )


class _PoweredFile:
    def __init__(self, file: DiskFile, node: File) -> None:
        self._file, self._node = file, node

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._node.data += bytes(data)

    def sync(self) -> None:
        self._file.sync()
        self._node.synced = self._node.data

    def close(self) -> None:
        self._file.close()


def copy_tree(source: Path, target: Path) -> Path:
    """A copy in which files that were one (hard links) are one again."""
    done: dict[tuple[int, int], Path] = {}
    for folder, _, files in os.walk(source):
        here = target / Path(folder).relative_to(source)
        here.mkdir(parents=True)
        for name in files:
            status = os.lstat(Path(folder) / name)
            key = (status.st_dev, status.st_ino)
            if key in done:
                os.link(done[key], here / name)
            else:
                shutil.copy2(Path(folder) / name, here / name)
                done[key] = here / name
    return target
