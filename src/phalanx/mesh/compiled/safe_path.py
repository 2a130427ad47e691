"""Whether another user could put something else at a path: code is loaded from it, by name."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

_MAX_LINKS = 40


def find_why_unsafe(folder: Path) -> str:
    """Why users besides this one and root could replace `folder` or what lies in it; empty if none
    could. `folder` is absolute. Raises OSError where it is not there."""
    for path in _walk(folder):
        status = os.lstat(path)
        if status.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to another user"
        if stat.S_ISLNK(status.st_mode):
            continue
        # With the sticky bit nobody renames what belongs to others.
        if _is_writable_by_others(status) and not status.st_mode & stat.S_ISVTX:
            return f"others may write in {path} (chmod go-w would do)"
    return ""


def make_private_parents(folder: Path) -> None:
    """Make the directories above `folder` that are not there, for this user alone. Raises OSError.

    `Path.mkdir(parents=True)` gives them what the umask leaves.
    """
    for parent in reversed(folder.parents):
        try:
            parent.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, f"{parent} is not a directory") from None


def _walk(folder: Path) -> Iterator[Path]:
    """All directories and links by which the kernel comes to `folder`, itself included."""
    to_come, path = list(folder.parts[1:]), Path("/")
    num_links = 0
    yield path
    while to_come:
        part = to_come.pop(0)
        if part == "..":
            path = path.parent
            continue
        step = path / part
        yield step
        if not step.is_symlink():
            path = step
            continue
        num_links += 1
        if num_links > _MAX_LINKS:
            raise OSError(f"{folder} has too many links")
        target = Path(os.readlink(step))
        to_come = [*target.parts[target.is_absolute() :], *to_come]
        if target.is_absolute():
            path = Path("/")


def _is_writable_by_others(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_group_of_this_user_alone(status.st_gid)


def _is_group_of_this_user_alone(group_id: int) -> bool:
    """Many distributions give each user a group of his own, and an umask that lets it write."""
    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(group_id)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
