"""The policy of restarts: a budget per window of time, and an end to crash loops."""

from __future__ import annotations

from collections import deque

from phalanx.core.errors import RestartBudgetError
from phalanx.core.units import format_seconds
from phalanx.launch.verdict import RankFailure

# A signal or a hang may come from outside, by accident even twice at one step.
SAME_FAILURE_LIMIT = 3
# The same words at the same step: unlike a signal, an exception does not come from outside.
SAME_EXCEPTION_LIMIT = 2


class RestartPolicy:
    """Remembers the restarts of one run."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._times: deque[float] = deque()
        self._last: tuple[int, str] | None = None
        self._num_same = 0
        self.num_restarts = 0

    def count_restart_or_raise(self, failure: RankFailure, now_s: float) -> None:
        """Count one restart because of `failure`; raise RestartBudgetError (exit 10) if it is
        one too many."""
        key = (failure.step, failure.signature)
        if key != self._last:
            self._num_same = 0
        self._num_same += 1
        self._last = key
        limit = SAME_FAILURE_LIMIT
        if failure.cause == "exception":
            limit = SAME_EXCEPTION_LIMIT
        if self._num_same >= limit:
            where = f"at step {failure.step}" if failure.step else "before the first step"
            raise RestartBudgetError(
                f"deterministic failure {where}: {failure.detail}",
                why=f"{self._num_same} times in a row",
            )
        # Restarts before the window no longer count.
        while self._times and now_s - self._times[0] > self._window_s:
            self._times.popleft()
        if len(self._times) >= self._max_restarts:
            raise RestartBudgetError(
                f"the restart budget is spent: {self._max_restarts} in"
                f" {format_seconds(self._window_s)}",
                why=f"last cause: {failure.summary}",
            )
        self._times.append(now_s)
        self.num_restarts += 1
