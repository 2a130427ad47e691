"""The policy of restarts: a budget per window of time, and an end to crash loops."""

from __future__ import annotations

from collections import deque

from phalanx.core.errors import ExitCode, RestartBudgetError
from phalanx.core.units import format_seconds
from phalanx.launch.verdict import RankFailure

# A signal or a hang may come from outside, by accident even twice at one step.
SAME_FAILURE_LIMIT = 3
# The same words at the same step: unlike a signal, an exception does not come from outside.
SAME_EXCEPTION_LIMIT = 2
# Attempts in a row in which the same rank failed before its first step, of a run that has trained:
# it is gone.
FAILED_STARTS_LIMIT = 2


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


class FailedStarts:
    """Counts attempts one after the other in which the same rank failed to start."""

    def __init__(self) -> None:
        self._rank, self._num_failed = -1, 0

    def count(self, failure: RankFailure, *, is_restart: bool) -> bool:
        """Count `failure`; True if it is that of a rank that failed to start again, by a reason
        that may be its own machine's."""
        is_failed_start = is_restart and failure.rank >= 0 and failure.step < 1
        if not is_failed_start or failure.exit_code != ExitCode.INTERNAL:
            self._rank, self._num_failed = -1, 0
            return False
        if failure.rank != self._rank:
            self._rank, self._num_failed = failure.rank, 0
        self._num_failed += 1
        return True

    @property
    def is_rank_gone(self) -> bool:
        return self._num_failed >= FAILED_STARTS_LIMIT
