"""The other ranks of this host: their processes, and the memory that they share."""

from __future__ import annotations

import errno
import os
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

        A process that may open no more files takes one for alive that has ended, as long as nobody
        has asked for its exit code. Raises OSError where this process cannot look otherwise: every
        peer would seem dead.
        """
        try:
            stat = read_process_stat_or_raise(self.pid)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            return _is_process_there(self.pid)
        return stat is not None and not stat.has_ended and stat.start_ticks == self.start_ticks


def _is_process_there(pid: int) -> bool:
    """True if there is a process `pid`; opens no file."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # Of another user, and there.
        pass
    return True
