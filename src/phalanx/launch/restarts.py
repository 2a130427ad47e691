"""The policy of restarts: a budget per window of time that progress resets, and an end to crash
loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.core.errors import ExitCode, RestartBudgetError
from phalanx.core.units import format_seconds
from phalanx.launch.rank_failure import RankFailure

# By accident a failure may come even twice at one step: a signal and a hang from outside, an
# exception by way of what code reads or reaches, or of a processor that computes wrong.
SAME_FAILURE_LIMIT = 3
# Attempts in a row in which the same rank failed before its first step, of a run that has trained:
# it is gone.
FAILED_STARTS_LIMIT = 2
# What a run must have done in one attempt for the restarts before it to count no longer: it went on
# for so long without a failure, and saved a checkpoint so many steps after the furthest of those
# failures. So a run that fails for ever either ends, or goes on by that much at least, for each
# budget that it spends.
PROGRESS_S, NUM_PROGRESS_STEPS = 600.0, 10
# Between two restarts after the same outage: twice as long each time.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


@dataclass(frozen=True)
class _CountedRestart:
    """A restart at `time_s` (monotonic) after a failure in `step`."""

    time_s: float
    step: int


@dataclass
class _Outage:
    """An outage that has failed the run since `began_s` (monotonic), at steps up to `step`, and the
    pause before the restart that is next."""

    signature: str
    step: int
    began_s: float
    num_restarts: int = 1
    next_pause_s: float = FIRST_PAUSE_S


class RestartPolicy:
    """Remembers the restarts of one run. An outage is waited for `outage_s` seconds.

    `describe_samples` names the samples of the batch of a step, in words; empty where that is not
    known.
    """

    def __init__(
        self,
        max_restarts: int,
        window_s: float,
        describe_samples: Callable[[int], str] = lambda step: "",
        outage_s: float = 0.0,
    ) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._describe_samples = describe_samples
        self._outage_s = outage_s
        self._outage: _Outage | None = None
        self._counted: list[_CountedRestart] = []
        self._last: tuple[int, str] | None = None
        self._num_same = 0
        self.num_restarts = 0
        self.is_last_of_outage = False
        """The restart that was counted last is the last one in its outage."""

    @property
    def num_counted(self) -> int:
        """The number of restarts that count now."""
        return len(self._counted)

    def count_restart_or_raise(
        self, failure: RankFailure, now_s: float, saved_step: int = 0
    ) -> float:
        """Count one restart because of `failure`, and return the seconds to wait before it; raise
        RestartBudgetError (exit 10) if it is one too many. `saved_step`: that of the newest
        checkpoint."""
        self.is_last_of_outage = False
        if failure.is_outage and self._outage_s > 0:
            pause_s = self._find_pause_or_raise(failure, now_s)
            if pause_s > 0:
                # The first one of an outage counts for all.
                self.num_restarts += 1
                return pause_s
        else:
            self._outage = None
            self._require_other_failure_than_before(failure)
        self._count_against_budget_or_raise(failure, now_s, saved_step)
        return 0.0

    def _find_pause_or_raise(self, failure: RankFailure, now_s: float) -> float:
        """The pause before a restart in an outage: none before the first one."""
        outage = self._outage
        self._last = None
        if outage is None or outage.signature != failure.signature or failure.step > outage.step:
            self._outage = _Outage(failure.signature, failure.step, now_s)
            return 0.0
        left_s = outage.began_s + self._outage_s - now_s
        if left_s <= 0:
            times = f"{outage.num_restarts} restarts in {format_seconds(now_s - outage.began_s)}"
            why = f"{times}; resilience.outage_s = {self._outage_s:g}"
            raise RestartBudgetError(
                f"an outage does not pass: {failure.detail}",
                why=why + self._describe_batch(failure),
            )
        pause_s = min(outage.next_pause_s, left_s)
        self.is_last_of_outage = pause_s == left_s
        outage.num_restarts += 1
        outage.next_pause_s = min(2.0 * outage.next_pause_s, LONGEST_PAUSE_S)
        return pause_s

    def _require_other_failure_than_before(self, failure: RankFailure) -> None:
        """Raise RestartBudgetError for a failure that has come at the same step too often."""
        key = (failure.step, failure.signature)
        if key != self._last:
            self._num_same = 0
        self._num_same += 1
        self._last = key
        if self._num_same >= SAME_FAILURE_LIMIT:
            where = f"at step {failure.step}" if failure.step else "before the first step"
            raise RestartBudgetError(
                f"deterministic failure {where}: {failure.detail}",
                why=f"{self._num_same} times in a row{self._describe_batch(failure)}",
            )

    def _describe_batch(self, failure: RankFailure) -> str:
        """ "; the batch of step 5 is samples 32 to 39"; empty where that is not known."""
        samples = self._describe_samples(failure.step) if failure.step else ""
        if not samples:
            return ""
        return f"; the batch of step {failure.step} is {samples}"

    def _count_against_budget_or_raise(
        self, failure: RankFailure, now_s: float, saved_step: int
    ) -> None:
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
        is_refused = failure.exit_code != ExitCode.INTERNAL or failure.is_outage
        if not is_failed_start or is_refused:
            self._rank, self._num_failed = -1, 0
            return False
        if failure.is_of_all_ranks:
            # Nothing tells one rank's machine from the others'.
            self._rank, self._num_failed = -1, 0
            return True
        if failure.rank != self._rank:
            self._rank, self._num_failed = failure.rank, 0
        self._num_failed += 1
        return True

    @property
    def is_rank_gone(self) -> bool:
        return self._num_failed >= FAILED_STARTS_LIMIT
