"""Finds a rendezvous store whose process is stopped: ranks that come to need it would wait for it,
and do without one that is lost."""

from __future__ import annotations

from phalanx.core.process_stat import read_state_letter
from phalanx.launch.rank_activity import STOPPED_LETTERS

MIN_STOPPED_S = 4.0
_LOOK_INTERVAL_S = 0.5


class StoppedStoreWatch:
    """Looks at the store with process `pid`, 0: there is none."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._looked_s = self._stopped_s = 0.0
        self._num_stopped = 0

    def is_stopped(self, now_s: float) -> bool:
        """True once it has been stopped at all looks for MIN_STOPPED_S."""
        if not self.pid or now_s < self._looked_s + _LOOK_INTERVAL_S:
            return False
        self._looked_s = now_s
        if read_state_letter(self.pid) not in STOPPED_LETTERS:
            self._num_stopped = 0
            return False
        self._num_stopped += 1
        if self._num_stopped == 1:
            self._stopped_s = now_s
        return self._num_stopped > 1 and now_s >= self._stopped_s + MIN_STOPPED_S
