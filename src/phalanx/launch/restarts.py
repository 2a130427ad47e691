"""The policy of restarts: a budget per window of time that progress resets, and an end to crash
loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.core.errors import ExitCode, RestartBudgetError
from phalanx.core.units import format_seconds
from phalanx.launch.rank_failure import RankFailure

# A signal, a hang or a data source may fail from outside, by accident even twice at one step.
SAME_FAILURE_LIMIT = 3
# The same words at the same step: unlike a signal, an exception does not come from outside.
SAME_EXCEPTION_LIMIT = 2
# Attempts in a row in which the same rank failed before its first step, of a run that has trained:
# it is gone.
FAILED_STARTS_LIMIT = 2
# What a run must have done in one attempt for the restarts before it to count no longer: it went on
# for so long without a failure, and saved a checkpoint so many steps after the furthest of those
# failures. So a run that fails for ever either ends, or goes on by that much at least, for each
# budget that it spends.
PROGRESS_S, NUM_PROGRESS_STEPS = 600.0, 10


@dataclass(frozen=True)
class _CountedRestart:
    """A restart at `time_s` (monotonic) after a failure in `step`."""

    time_s: float
    step: int


class RestartPolicy:
    """Remembers the restarts of one run. `describe_samples` names the samples of the batch of a
    step, in words; empty where that is not known."""

    def __init__(
        self,
        max_restarts: int,
        window_s: float,
        describe_samples: Callable[[int], str] = lambda step: "",
    ) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._describe_samples = describe_samples
        self._counted: list[_CountedRestart] = []
        self._last: tuple[int, str] | None = None
        self._num_same = 0
        self.num_restarts = 0

    @property
    def num_counted(self) -> int:
        """The number of restarts that count now."""
        return len(self._counted)

    def count_restart_or_raise(
        self, failure: RankFailure, now_s: float, saved_step: int = 0
    ) -> None:
        """Count one restart because of `failure`; raise RestartBudgetError (exit 10) if it is
        one too many. `saved_step`: that of the newest checkpoint."""
        key = (failure.step, failure.signature)
        if key != self._last:
            self._num_same = 0
        self._num_same += 1
        self._last = key
        limit = SAME_FAILURE_LIMIT
        if failure.cause == "exception" and not failure.is_of_data_source:
            limit = SAME_EXCEPTION_LIMIT
        if self._num_same >= limit:
            where = f"at step {failure.step}" if failure.step else "before the first step"
            why = f"{self._num_same} times in a row"
            samples = self._describe_samples(failure.step) if failure.step else ""
            if samples:
                why += f"; the batch of step {failure.step} is {samples}"
            raise RestartBudgetError(
                f"deterministic failure {where}: {failure.detail}",
                why=why,
            )
        since_s = now_s - self._window_s
        self._counted = [restart for restart in self._counted if restart.time_s >= since_s]
        if self._has_progressed(now_s, saved_step):
            self._counted.clear()
        if len(self._counted) >= self._max_restarts:
            raise RestartBudgetError(
                f"the restart budget is spent: {self._max_restarts} in"
                f" {format_seconds(self._window_s)}",
                why=f"last cause: {failure.summary}",
            )
        self._counted.append(_CountedRestart(now_s, failure.step))
        self.num_restarts += 1

    def _has_progressed(self, now_s: float, saved_step: int) -> bool:
        """True if the attempt that failed now had left the failures before it behind."""
        if not self._counted or now_s - self._counted[-1].time_s < PROGRESS_S:
            return False
        furthest = max(restart.step for restart in self._counted)
        return saved_step >= furthest + NUM_PROGRESS_STEPS


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
