"""The other ranks of this host: their processes, and the memory that they share."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass

import torch.distributed as dist

from phalanx.core.process_stat import read_process_stat_or_raise
from phalanx.mesh.shared_memory.arena import MappedArena
from phalanx.mesh.shared_memory.board import has_left
from phalanx.mesh.shared_memory.segments import SeenSegments

# The system closes the files of a process some time before it says that the process has ended.
_DYING_S = 1.0
_LOOK_S = 0.005
# What this process may have no more of, whatever its peers do.
_OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


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


def describe_loss(peer: Peer, needed_by: str) -> dist.DistBackendError:
    """The error of an operation, `needed_by`, that waits for a rank which has died or left."""
    ending = "has left" if has_left(peer.arena) else "has died"
    return dist.DistBackendError(
        f"Connection closed by peer: rank {peer.rank} (process {peer.pid}) {ending}, and"
        f" {needed_by} needs it"
    )


def explain_unseen_memory(peer: Peer, needed_by: str, error: OSError | ValueError) -> Exception:
    """What to raise where this process cannot see memory that `peer` has named: its loss, if it is
    lost, or about to be. ValueError if it named what cannot be there."""
    patience_s = 0.0
    if isinstance(error, OSError) and error.errno not in _OWN_LIMITS:
        patience_s = _DYING_S
    deadline_s = time.monotonic() + patience_s
    while True:
        if has_left(peer.arena) or not peer.is_alive():
            return describe_loss(peer, needed_by)
        if time.monotonic() >= deadline_s:
            break
        time.sleep(_LOOK_S)
    named = f"{needed_by}: memory that rank {peer.rank} (process {peer.pid}) has named"
    if isinstance(error, OSError):
        return RuntimeError(f"{named} cannot be mapped: {error}")
    return ValueError(f"{named} is not there: {error}")
