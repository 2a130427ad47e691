"""Ends a process that user code forked off a rank and that would train on in the rank's place."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import NoReturn


class ForkedCopyGuard:
    """Belongs to what only the process that made it may use: `is_copy` is True in one that is
    forked off it later.

    A flag that the fork sets, for it is looked at with each collective.
    """

    def __init__(self, rank: int = -1) -> None:
        self._rank, self.is_copy = rank, False
        _guards.add(self)

    def end_copy(self) -> NoReturn:
        """End this process, which has the rank's memory, connections and files, but is not the
        rank: each byte that it sent or summed on would be taken for the rank's."""
        rank = f"rank {self._rank}" if self._rank >= 0 else "this rank"
        line = (
            f"phalanx: process {os.getpid()}, which code of yours forked off {rank}, used what"
            " belongs to the rank (a phase or a collective), and ends here; the rank goes on. After"
            " os.fork, end such a process with os._exit where its work is done\n"
        )
        with contextlib.suppress(OSError):
            os.write(2, line.encode())
        # Nothing is flushed or cleaned up: it is the rank's.
        os._exit(1)


_guards: weakref.WeakSet[ForkedCopyGuard] = weakref.WeakSet()


def _mark_copies() -> None:
    for guard in list(_guards):
        guard.is_copy = True


os.register_at_fork(after_in_child=_mark_copies)
