"""When the ranks of an attempt that still run must be killed: it follows from what has happened so
far."""

from __future__ import annotations

import math

from phalanx.launch.attempt_end import AttemptEnd
from phalanx.launch.launch_spec import LaunchSpec
from phalanx.launch.positions import has_begun_training
from phalanx.launch.stop_request import StopRequest

# After the first failure, where ranks are kept: how long those that still run may take to notice,
# leave their groups and wait for the next attempt. Time in which one of them wanted a processor and
# had none does not count, up to the second of these, which is by the clock.
WAIT_FOR_ATTEMPT_WINDOW_S, WAIT_FOR_ATTEMPT_LIMIT_S = 3.0, 30.0
# After the order to kill ranks: how long the server may take to tell of their ends. It may be
# without a processor for as long as ranks may.
EXIT_AFTER_KILL_TIMEOUT_S = 2.0
# After the first failure: how long others may take to report theirs, while only consequences are
# known, or the cause.
SUSPECT_WINDOW_S, CAUSE_WINDOW_S = 1.0, 0.3
# After the first report of a rank that does not end by itself: its way out, or its sinks', may wait
# for the others.
EXIT_AFTER_REPORT_WINDOW_S = 3.0
# While stopping, after the first rank left with an error: the save can no longer succeed.
EXIT_AFTER_FAILED_STOP_S = 5.0
# After the first rank left a run that all say is done: longer than a rank's sinks may take. A rank
# that others left in a collective of the sample would stay until the collective's time is over.
EXIT_AFTER_DONE_WINDOW_S = 90.0


class KillDeadline:
    """The time (monotonic seconds, as all here) at which remaining ranks must be killed; infinite
    until something happens that ends the attempt. What `end` and `stop` say is looked at anew each
    time."""

    def __init__(
        self, end: AttemptEnd, num_ranks: int, spec: LaunchSpec, stop: StopRequest
    ) -> None:
        self._end, self._num_ranks = end, num_ranks
        self._spec, self._stop = spec, stop
        self._failed_s = self._reported_s = math.inf
        # Of a stop that was asked for in an earlier attempt.
        self._grace_until_s = stop.asked_s + spec.grace_s
        self._not_before_s = -math.inf
        self._last_exits_s = math.inf
        self._lack_s = 0.0
        self._killed_s, self._lack_at_kill_s = math.inf, 0.0

    @property
    def has_killed(self) -> bool:
        """True once the server was told to kill the ranks."""
        return not math.isinf(self._killed_s)

    @property
    def has_failed(self) -> bool:
        """True once a rank has failed, died or reported that it will."""
        return not math.isinf(min(self._failed_s, self._reported_s))

    def note_failure(self, now_s: float) -> None:
        """A rank has failed, or is to be taken for failed; the first one counts."""
        self._failed_s = min(self._failed_s, now_s)

    def note_report(self, now_s: float) -> None:
        """A rank reports its failure, and has not ended yet; the first one counts."""
        self._reported_s = min(self._reported_s, now_s)

    def begin_grace(self, now_s: float) -> None:
        """The ranks were told to stop, or agreed to: one that stays behind does not stay for
        ever."""
        self._grace_until_s = min(self._grace_until_s, now_s + self._spec.grace_s)

    def begin_last_exits(self, now_s: float) -> None:
        """All work is done, and the first process is gone, or is killed now."""
        self._last_exits_s = min(self._last_exits_s, now_s)
        self._grace_until_s = min(self._grace_until_s, now_s + EXIT_AFTER_DONE_WINDOW_S)

    def compute_exit_wait_s(self, now_s: float) -> float:
        """Seconds since the first process of a run that is done was gone; negative infinity if none
        is."""
        return now_s - self._last_exits_s

    def is_grace_over(self, now_s: float) -> bool:
        return now_s >= self._grace_until_s

    def postpone(self, until_s: float) -> None:
        """Kill no rank before `until_s`."""
        self._not_before_s = until_s

    def note_processor_lack(self, total_s: float) -> None:
        """Since the first failure, ranks that have not noticed it, or not left, or the server were
        without a processor for so long."""
        self._lack_s = total_s

    def note_kill(self, now_s: float) -> None:
        """The server is told to kill the ranks that remain."""
        self._killed_s, self._lack_at_kill_s = now_s, self._lack_s

    def compute_s(self) -> float:
        """The time at which remaining ranks must be killed, as things stand."""
        failed_s = min(self._failed_s, self._reported_s + EXIT_AFTER_REPORT_WINDOW_S)
        due_s = min(self._grace_until_s, failed_s + self._compute_delay_after_failure_s())
        return max(self._not_before_s, due_s)

    def compute_server_due_s(self) -> float:
        """The time at which the server must be killed, which has not told that the ranks are."""
        lack_s = self._lack_s - self._lack_at_kill_s
        may_take_s = min(EXIT_AFTER_KILL_TIMEOUT_S + lack_s, WAIT_FOR_ATTEMPT_LIMIT_S)
        return self._killed_s + may_take_s

    def waits_for_survivors(self) -> bool:
        """True once a rank has failed by itself, where the others are kept: also those that were
        asked to stop, if they may hold steps that are not saved."""
        # Of a store that is lost ranks may train on: that alone is no failure.
        return (
            self.has_failed
            and self._spec.keeps_ranks
            and not self._stop.at_once
            and self._end.is_primary_failure_known
            and (self._stop.signal is None or self._may_ranks_hold_state())
        )

    def _may_ranks_hold_state(self) -> bool:
        return self._end.num_kept > 0 or has_begun_training(self._spec.run_dir, self._num_ranks)

    def _compute_delay_after_failure_s(self) -> float:
        num_heard = len(self._end.exits.keys() | self._end.records.keys())
        is_stopping = self._stop.signal is not None
        if self.waits_for_survivors():
            window_s = WAIT_FOR_ATTEMPT_WINDOW_S
            if is_stopping:
                # One that was asked to stop may be in its save, or in a long forward: the half of
                # the grace that is left then is for the save of what it holds.
                window_s = max(EXIT_AFTER_FAILED_STOP_S, self._spec.grace_s / 2)
            return min(window_s + self._lack_s, WAIT_FOR_ATTEMPT_LIMIT_S)
        # No rank is left that could tell us more.
        if num_heard == self._num_ranks and self._failed_s < math.inf:
            return CAUSE_WINDOW_S
        if is_stopping and has_begun_training(self._spec.run_dir, self._num_ranks):
            return EXIT_AFTER_FAILED_STOP_S
        if is_stopping or self._end.is_primary_failure_known:
            return CAUSE_WINDOW_S
        return SUSPECT_WINDOW_S
