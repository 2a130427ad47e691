"""What the kernel counts of its out-of-memory killer: a rank that ended by SIGKILL while the count
of its cgroup rose was killed for memory.

A cgroup of version 2 says it in `memory.events`, one of version 1 in `memory.oom_control`; where
neither is there, `/proc/vmstat` has the count of the whole machine.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.cgroups import list_folders_up_to, read_memory_limit_of
from phalanx.core.units import format_bytes

_MACHINE = Path("/proc/vmstat")


@dataclass(frozen=True)
class OomKill:
    """A kill for memory: the cgroup whose limit was met ("" is the machine's), and the bytes that
    it may use (0: no limit, neither of the cgroup whose count rose nor of one around it)."""

    cgroup: str
    limit_bytes: int

    def describe(self) -> str:
        """The killer in words that are the same each time that it strikes there."""
        place = f"cgroup {self.cgroup}" if self.cgroup else "this machine"
        if self.limit_bytes:
            place += f", limit {format_bytes(self.limit_bytes)}"
        return f"the kernel's out-of-memory killer ({place})"


@dataclass(frozen=True)
class _Counter:
    """The file with the count, and where the cgroup's file system is mounted; "" for the
    machine's."""

    path: Path
    mount: str

    def read(self) -> int | None:
        """Kills so far; None where the kernel does not count them."""
        for line in _read_text(self.path).splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.strip().isdecimal():
                return int(value)
        return None

    def find_limit(self) -> OomKill:
        """What a kill here is for: the least limit of the cgroup and of those around it, of which
        a batch system sets its own on a parent."""
        if not self.mount:
            return OomKill("", 0)
        mount = Path(self.mount)
        own = self.path.parent.relative_to(mount)
        # The innermost of equal ones.
        limits = [
            (read_memory_limit_of(folder, _read_text), folder)
            for folder in list_folders_up_to(mount, str(own))
        ]
        limit_bytes, folder = min(limits, key=operator.itemgetter(0))
        if limit_bytes == math.inf:
            folder, limit_bytes = mount / own, 0
        name = "" if folder == mount else str(folder.relative_to(mount))
        return OomKill(f"/{name}", int(limit_bytes))


class OomWatch:
    """Compares the counts of the cgroups of ranks before and after a death."""

    def __init__(self) -> None:
        self._counters: dict[int, _Counter] = {}
        self._seen: dict[_Counter, int] = {}

    def begin(self, pids: Sequence[int]) -> None:
        """Take note of the counts of the ranks' cgroups, by rank, as they are now."""
        self._counters = {}
        for rank, pid in enumerate(pids):
            counter = _find_counter(pid)
            count = counter.read()
            if count is not None:
                self._counters[rank] = counter
                self._seen[counter] = count

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks of which a kill would be known."""
        return frozenset(self._counters)

    def find_kill(self, rank: int) -> OomKill | None:
        """The kill that ended `rank`, which died by SIGKILL; None where the kernel did not do it.

        Each kill that was counted explains one death.
        """
        counter = self._counters.get(rank)
        if counter is None:
            return None
        count = counter.read()
        if count is None or count <= self._seen[counter]:
            return None
        self._seen[counter] += 1
        return counter.find_limit()


def find_memory_limit(pid: int | str = "self") -> int:
    """Bytes that the cgroups of a process may use; 0 where none of them has a limit."""
    return _find_counter(pid).find_limit().limit_bytes


def _find_counter(pid: int | str) -> _Counter:
    """The count of kills that a process of this machine would be in."""
    mounts = _find_cgroup_mounts(_read_text(Path("/proc/self/mountinfo")))
    for line in _read_text(Path(f"/proc/{pid}/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        name = "memory.events" if not controllers else "memory.oom_control"
        if controllers and "memory" not in controllers.split(","):
            continue
        root = mounts.get("memory" if controllers else "", "")
        # The nearest that counts: a cgroup need not have the controller of memory, nor be shown
        # where a container has its own as the topmost one.
        for folder in list_folders_up_to(Path(root), path) if root else ():
            counter = _Counter(folder / name, root)
            if counter.read() is not None:
                return counter
    return _Counter(_MACHINE, "")


def _find_cgroup_mounts(mountinfo: str) -> Mapping[str, str]:
    """Where cgroups are mounted: "memory" for the controller of version 1, "" for version 2."""
    mounts = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            mounts[""] = before.split()[4]
        elif kind == "cgroup" and "memory" in options.split(","):
            mounts["memory"] = before.split()[4]
    return mounts


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
