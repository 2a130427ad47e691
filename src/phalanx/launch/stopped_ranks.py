"""Finds ranks whose process is stopped while others leave because one has failed: these wait for
them, and cannot tell that anything has ended."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.core.process_stat import read_state_letter
from phalanx.launch.rank_activity import STOPPED_LETTERS

# Less than survivors may take to leave, by enough for them to notice then.
STOPPED_WHILE_OTHERS_LEAVE_S = 1.0


class StoppedRanks:
    """Looks at ranks, and remembers since when each is stopped."""

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}

    def find(self, pids: Mapping[int, int], now_s: float) -> tuple[int, ...]:
        """The ranks, by the numbers of `pids`, that have been stopped at all looks for
        STOPPED_WHILE_OTHERS_LEAVE_S."""
        stopped = [rank for rank, pid in pids.items() if read_state_letter(pid) in STOPPED_LETTERS]
        self._since_s = {rank: self._since_s.get(rank, now_s) for rank in stopped}
        return tuple(
            rank
            for rank, since_s in self._since_s.items()
            if now_s >= since_s + STOPPED_WHILE_OTHERS_LEAVE_S
        )
