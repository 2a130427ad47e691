"""The other ranks of this host: their processes, and the memory that they share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.mesh.shared_memory.arena import MappedArena
from phalanx.mesh.shared_memory.segments import SeenSegments


@dataclass(frozen=True)
class Peer:
    """A rank of the world, its process, and its arena as mapped here.

    `start_ticks` tells a process from a later one of the same number.
    """

    rank: int
    pid: int
    start_ticks: int
    arena: MappedArena
    segments: SeenSegments

    def is_alive(self) -> bool:
        return find_start_of_living_process(self.pid) == self.start_ticks


def find_start_of_living_process(pid: int) -> int | None:
    """When process `pid` started, in ticks of the kernel's clock; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name of the program, in parentheses, may hold spaces.
    fields = text.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return None
    return int(fields[19])
