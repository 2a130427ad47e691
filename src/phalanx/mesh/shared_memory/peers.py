"""The other ranks of this host: their processes, and the memory that they share."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.process_stat import read_process_stat_or_raise
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
        """True if the process is there and has not ended.

        Raises OSError where this process cannot look, as one that may open no more files: to such a
        process every peer would seem dead.
        """
        stat = read_process_stat_or_raise(self.pid)
        return stat is not None and not stat.has_ended and stat.start_ticks == self.start_ticks
