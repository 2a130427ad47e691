"""The control groups (cgroups) around this process, and what they limit."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

from phalanx.core.files import read_whole_regular_file

_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def read_cgroup_text(path: Path) -> str:
    """What stands in a file of the kernel's; nothing if it cannot be read."""
    try:
        return read_whole_regular_file(path).decode(errors="replace")
    except OSError:
        return ""


def list_cgroups_around(
    controller: str, own_cgroups: Path = _OWN_CGROUPS, cgroups: Path = _CGROUPS
) -> list[Path]:
    """The folders of this process's cgroups of `controller`, version 1 or 2, each before those
    around it: a limit of any of them holds, and a batch system sets its own on a parent."""
    folders: list[Path] = []
    for line in read_cgroup_text(own_cgroups).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            mount = cgroups
        elif controller in controllers.split(","):
            mount = cgroups / controllers
            if not os.path.isdir(mount):
                mount = cgroups / controller
        else:
            continue
        # A container may see its own cgroup as the topmost one, whatever it is called outside.
        folders += list_folders_up_to(mount, path)
    return folders


def list_folders_up_to(mount: Path, path: str) -> list[Path]:
    """The folder of the cgroup `path` under `mount`, and those around it up to `mount`."""
    own = mount / path.lstrip("/")
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(mount)]


def read_memory_limit(own_cgroups: Path = _OWN_CGROUPS, cgroups: Path = _CGROUPS) -> float:
    """Bytes that cgroups leave this process and those beside it (what `sbatch --mem` or `docker
    run --memory` sets); infinity without a limit, and where nobody says."""
    folders = list_cgroups_around("memory", own_cgroups, cgroups)
    return min(map(read_memory_limit_of, folders), default=math.inf)


def read_memory_limit_of(cgroup: Path, read: Callable[[Path], str] = read_cgroup_text) -> float:
    """Bytes that this one cgroup may use, by what `read` reads; infinity without a limit of its
    own."""
    # Version 2, then version 1.
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = read(cgroup / name).strip()
        # Version 2 writes "max" where there is no limit, version 1 a number near 2**63.
        if text.isdecimal() and int(text) < 1 << 60:
            return int(text)
    return math.inf
