"""What follows on an attempt: its run ends, or its ranks start again.

Each decision is recorded and told where it is made.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.core.errors import CodeDiffersError, ExitCode, RanksDifferError, RestartBudgetError
from phalanx.core.roll_back import RollBack
from phalanx.core.units import format_seconds, plural
from phalanx.launch.attempt_end import AttemptEnd
from phalanx.launch.end_record import STOPPED_EXIT_CODES
from phalanx.launch.launch_spec import LaunchSpec
from phalanx.launch.outcome import RunOutcome
from phalanx.launch.rank_failure import LOST_CONNECTION, OUT_OF_MEMORY, RankFailure
from phalanx.launch.restarts import FAILED_STARTS_LIMIT, FailedStarts, RestartPolicy
from phalanx.launch.stop_request import StopRequest, name_stop_signal
from phalanx.launch.verdict import blame_nobody, find_root_failure
from phalanx.observe.bus import Bus
from phalanx.observe.events import LayoutChanged, Note, RankFailed, RestartScheduled, RolledBack
from phalanx.observe.where_words import format_rank_list

# A job that another one has taken over, or whose disk refuses, is not to be queued again: a person
# must act first.
FINAL_EXIT_CODES_WHILE_STOPPING = (ExitCode.RUN_LOCKED, ExitCode.RESOURCES)


@dataclass(frozen=True)
class StartAgain:
    """Another attempt follows, with `num_ranks` ranks.

    `survivors`: the ranks of the ended attempt whose processes go on, and which ranks they are in
    the next one.
    """

    num_ranks: int
    survivors: Mapping[int, int]
    pause_s: float = 0.0
    """Seconds to wait before it."""


class RecoveryPolicy:
    """Decides after each attempt of one run whether the run ends or goes on, and how."""

    def __init__(self, spec: LaunchSpec, bus: Bus, say: Callable[[str], None]) -> None:
        self._spec, self._attempts, self._bus, self._say = spec, spec.attempts, bus, say
        self._restarts = RestartPolicy(
            spec.max_restarts,
            spec.restart_window_s,
            spec.attempts.describe_samples,
            spec.outage_s,
        )
        self._failed_starts = FailedStarts()
        self._num_ranks, self._num_attempts = spec.num_ranks, 0
        # After which ranks were started again to save before a stop.
        self._failure_beside_stop: RankFailure | None = None

    def decide(self, end: AttemptEnd, stop: StopRequest) -> RunOutcome | StartAgain:
        """Decide what follows on the attempt that ended in `end`."""
        self._num_attempts += 1
        failure = find_root_failure(end, self._spec.run_dir)
        if stop.signal is not None:
            again = None if failure is None else self._start_again_to_save(end, failure, stop)
            return again or self._end_on_stop_request(end, failure, stop)
        if failure is None and end.was_told_to_leave and end.exit_codes != {ExitCode.OK}:
            return self._grow()
        if failure is None and end.is_cut_off:
            failure = blame_nobody(end)
        if failure is None:
            return self._end_after_work(end, stop)
        if failure.roll_back is not None:
            return self._go_back(failure.roll_back)
        self._emit_rank_failed(failure)
        if failure.cause == OUT_OF_MEMORY and self._lessen_memory(failure):
            return StartAgain(self._num_ranks, _keep_numbers(end, failure))
        return self._recover(end, failure)

    def _start_again_to_save(
        self, end: AttemptEnd, failure: RankFailure, stop: StopRequest
    ) -> StartAgain | None:
        """Start again after a failure that came before a stop was done, so that survivors save what
        they hold and leave; None where that wins no step, cannot help, or comes too late."""
        survivors = _keep_numbers(end, failure)
        held_step = max((end.waiting[rank] for rank in survivors), default=0)
        if stop.at_once or end.grace_over or held_step == 0 or not self._may_pass(failure):
            return None
        # Asked last: a store that is far away, or does not answer, takes its time.
        saved_step = self._attempts.find_newest_step()
        now_s = time.monotonic()
        if held_step <= saved_step or now_s >= stop.asked_s + self._spec.grace_s:
            return None
        try:
            self._restarts.count_restart_or_raise(failure, now_s, saved_step)
        except RestartBudgetError:
            return None
        self._failure_beside_stop = failure
        self._emit_rank_failed(failure)
        self._announce_restart(failure, survivors, held_step, purpose=" to save before the stop")
        return StartAgain(self._num_ranks, survivors)

    def _may_pass(self, failure: RankFailure) -> bool:
        """True where the same ranks may do better at once: no outage, and no lack of memory."""
        is_failed_start = self._failed_starts.count(failure, is_restart=self._num_attempts > 1)
        if failure.is_outage or failure.cause == OUT_OF_MEMORY or failure.roll_back is not None:
            return False
        return failure.restartable or (is_failed_start and not self._failed_starts.is_rank_gone)

    def _recover(self, end: AttemptEnd, failure: RankFailure) -> RunOutcome | StartAgain:
        """Start again after a failure, with fewer ranks if one does not come back; or end."""
        is_failed_start = self._failed_starts.count(failure, is_restart=self._num_attempts > 1)
        is_rank_gone = self._failed_starts.is_rank_gone
        has_shrunk = is_rank_gone and self._shrink(failure, end)
        no_shrink = ""
        if is_rank_gone and not has_shrunk:
            no_shrink = self._explain_no_shrink(failure)
        # A start that failed once where ranks have started before may do better.
        may_try_again = has_shrunk or (
            is_failed_start and (self._attempts.is_elastic or not is_rank_gone)
        )
        starts_anew = self._may_kept_ranks_be_why(end, failure)
        if self._spec.stepless or not (failure.restartable or may_try_again or starts_anew):
            return self._fail(
                failure.exit_code, self._build_report_with_advice(failure) + no_shrink
            )
        try:
            pause_s = self._restarts.count_restart_or_raise(
                failure, time.monotonic(), self._attempts.find_newest_step()
            )
        except RestartBudgetError as error:
            message = str(error)
            if failure.report != failure.summary:
                message += f"\n{failure.report}"
            return self._fail(error.exit_code, message + no_shrink)
        survivors = {} if starts_anew else self._choose_survivors(end, failure, has_shrunk)
        held_step = _find_held_step(end) if survivors else -1
        self._announce_restart(
            failure, survivors, held_step, pause_s=pause_s, has_shrunk=has_shrunk
        )
        return StartAgain(self._num_ranks, survivors, pause_s)

    def _may_kept_ranks_be_why(self, end: AttemptEnd, failure: RankFailure) -> bool:
        """True where ranks that were started beside kept ones refused before a step.

        Code of the user's that runs a second time in one process may give another model than the
        first time, or the same object. Not where their files differ: a start of all would hide it.
        """
        if end.num_kept == 0 or failure.step >= 1 or failure.restartable:
            return False
        kinds = {report.type for report in end.error_reports.values()}
        if CodeDiffersError.__name__ in kinds:
            return False
        return RanksDifferError.__name__ in kinds or failure.exit_code == ExitCode.JOB

    def _build_report_with_advice(self, failure: RankFailure) -> str:
        """The report, with what would need less memory where there was too little."""
        if failure.cause != OUT_OF_MEMORY:
            return failure.report
        return "\n".join([failure.report, *self._attempts.list_memory_advice()])

    def _choose_survivors(
        self, end: AttemptEnd, failure: RankFailure, has_shrunk: bool
    ) -> dict[int, int]:
        """The ranks whose processes go on after a failure, and which ranks they are then."""
        if self._restarts.is_last_of_outage:
            # It may be over, and the processes hold on to connections that are dead.
            return {}
        survivors = _keep_numbers(end, failure)
        if not has_shrunk:
            return survivors
        # Numbered anew: a gap would be a rank that is not there.
        going_on = self._attempts.choose_survivors([*survivors])
        return {rank: number for number, rank in enumerate(going_on)}

    def end_in_pause(self, stop: StopRequest) -> RunOutcome:
        """The outcome of a stop request that came in the pause before a restart."""
        assert stop.signal is not None
        code, sender = ExitCode.PREEMPTED, name_stop_signal(stop.signal)
        if stop.signal == signal.SIGINT:
            code, sender = ExitCode.INTERRUPTED, "Ctrl-C"
        stands = self._attempts.describe_what_stands()
        return self._stop(code, f"stopped by {sender} before ranks were started again; {stands}")

    def _lessen_memory(self, failure: RankFailure) -> bool:
        """Go on with a payload that needs less memory, if the job allows that."""
        change = self._attempts.lessen_memory()
        if not change:
            return False
        self._bus.emit(Note("memory_lessened", {"why": f"{failure.summary}; {change}"}))
        restart, budget = self._restarts.num_counted, self._spec.max_restarts
        self._bus.emit(RestartScheduled(restart, budget, self._attempts.find_newest_step()))
        self._say(f"{failure.summary}; {change}, and starting again")
        return True

    def _shrink(self, failure: RankFailure, end: AttemptEnd) -> bool:
        """Go on with fewer ranks than now, if the job allows that."""
        num_ranks = self._attempts.shrink()
        if num_ranks is None:
            return False
        self._change_num_ranks(
            num_ranks,
            f"rank {failure.rank} failed to start {FAILED_STARTS_LIMIT} times",
            _find_held_step(end),
        )
        return True

    def _explain_no_shrink(self, failure: RankFailure) -> str:
        """A last line on a rank that is gone, where the job allows fewer ranks in vain."""
        why = self._attempts.explain_no_shrink()
        if not why:
            return ""
        return f"\nrank {failure.rank} does not start, and the run needs all ranks: {why}"

    def _grow(self) -> StartAgain:
        num_ranks = self._attempts.grow()
        self._change_num_ranks(num_ranks, "a checkpoint is there, and all ranks are tried again")
        return StartAgain(num_ranks, {})

    def _change_num_ranks(self, num_ranks: int, why: str, held_step: int = -1) -> None:
        text = self._attempts.describe_last_change()
        step = max(self._attempts.find_newest_step(), held_step)
        self._bus.emit(LayoutChanged(step, self._num_ranks, num_ranks, text, why))
        self._num_ranks = num_ranks
        self._failed_starts = FailedStarts()

    def _go_back(self, roll_back: RollBack) -> StartAgain:
        epoch = self._attempts.go_back(roll_back)
        # Whoever shows the run's events says it.
        self._bus.emit(
            RolledBack(
                step=roll_back.step,
                cause=roll_back.kind,
                why=roll_back.why,
                not_after_step=roll_back.not_after_step,
                skip_to_sample=roll_back.skip_to_sample,
                failed_rank=roll_back.rank,
                epoch=epoch,
            )
        )
        return StartAgain(self._num_ranks, {})

    def _end_after_work(self, end: AttemptEnd, stop: StopRequest) -> RunOutcome:
        """The outcome if all ranks report that they finished, or that they agreed to leave because
        one of them was told to."""
        if end.exit_codes == {ExitCode.OK}:
            return self._finish()
        code = ExitCode.INTERRUPTED
        if ExitCode.PREEMPTED in end.exit_codes:
            code = ExitCode.PREEMPTED
        return self._stop(code, self._describe_leaving(end, stop))

    def _end_on_stop_request(
        self, end: AttemptEnd, failure: RankFailure | None, stop: StopRequest
    ) -> RunOutcome:
        """The outcome after a request to stop.

        Whatever happened on the way, the run is to be continued, not repaired.
        """
        code = ExitCode.PREEMPTED
        if stop.at_once or stop.signal == signal.SIGINT:
            code = ExitCode.INTERRUPTED
        if not stop.at_once and end.exit_codes == {ExitCode.OK}:
            # At once: a store that is far away may take its time to tell what stands.
            return self._finish()
        stands = self._attempts.describe_what_stands()
        if stop.at_once:
            return self._stop(code, f"stopped at once by Ctrl-C; {stands}")
        if not end.exits and not end.waiting and not end.server_loss:
            return self._stop(code, self._describe_stop_before_start(stands))
        if failure is None or (end.server_loss and end.grace_over):
            message = self._describe_leaving(end, stop)
            if end.grace_over and self._failure_beside_stop is not None:
                message += f"\n{self._failure_beside_stop.report}"
            return self._stop(code, message)
        if failure.exit_code in FINAL_EXIT_CODES_WHILE_STOPPING:
            self._emit_rank_failed(failure)
            return self._fail(failure.exit_code, failure.report)
        return self._stop(code, self._describe_failure_beside_stop(failure, stands))

    def _describe_stop_before_start(self, stands: str) -> str:
        if self._num_attempts == 1:
            return "stopped before the ranks had started; nothing is lost"
        return f"stopped before the ranks had started again; {stands}"

    def _describe_failure_beside_stop(self, failure: RankFailure, stands: str) -> str:
        """The message about a rank that failed while the run was to stop; where a signal ended it
        before its first step, no step is lost, and only when that was is told."""
        if failure.step >= 1 or failure.cause != "signal":
            return f"failed while stopping; {stands}\n{failure.report}"
        if self._num_attempts == 1:
            return f"stopped before the first step; {stands}"
        return f"stopped before ranks that were lost trained again; {stands}"

    def _describe_leaving(self, end: AttemptEnd, stop: StopRequest) -> str:
        """The message about ranks that were asked to stop; `stop` says by which signal if the
        command was, and not one of its ranks."""
        stands = self._attempts.describe_what_stands()
        are_ends_known = end.exits and not end.server_loss
        have_left = end.exit_codes <= {ExitCode.OK, *STOPPED_EXIT_CODES}
        if not have_left or (end.grace_over and not are_ends_known):
            why = ""
            if end.server_loss:
                why = " (the process that starts them, which was to ask them, did not answer)"
            return f"the ranks did not save within the grace period{why} and were killed; {stands}"
        if stop.signal == signal.SIGINT:
            sender = "Ctrl-C"
        elif stop.signal is not None:
            sender = name_stop_signal(stop.signal)
        else:
            was_terminated = ExitCode.PREEMPTED in end.exit_codes
            sender = f"{'a signal' if was_terminated else 'SIGINT'} to a rank"
        message = f"stopped by {sender}; {stands}"
        if end.grace_over:
            message += "; processes of ranks had not ended within the grace period, and were killed"
        return message

    def _finish(self) -> RunOutcome:
        return self._build_outcome(ExitCode.OK, "finished", "")

    def _stop(self, code: ExitCode, message: str) -> RunOutcome:
        status = "preempted" if code == ExitCode.PREEMPTED else "interrupted"
        return self._build_outcome(code, status, message)

    def _fail(self, code: int, message: str) -> RunOutcome:
        return self._build_outcome(code, "failed", message)

    def _build_outcome(self, code: int, status: str, message: str) -> RunOutcome:
        restarts = self._restarts.num_restarts
        return RunOutcome(int(code), status, message, self._num_attempts, restarts)

    def _emit_rank_failed(self, failure: RankFailure) -> None:
        self._bus.emit(
            RankFailed(
                failed_rank=-1 if failure.is_of_all_ranks else failure.rank,
                step=failure.step,
                phase=failure.phase,
                cause=failure.cause,
                detail=failure.detail,
                detected_s=failure.detected_s,
                hang_kind=failure.hang_kind,
                is_oom_kill=failure.is_oom_kill,
                is_of_all_ranks=failure.is_of_all_ranks,
            )
        )

    def _announce_restart(
        self,
        failure: RankFailure,
        survivors: Mapping[int, int],
        held_step: int,
        *,
        pause_s: float = 0.0,
        has_shrunk: bool = False,
        purpose: str = "",
    ) -> None:
        from_step = self._attempts.find_newest_step()
        restart, budget = self._restarts.num_counted, self._spec.max_restarts
        self._bus.emit(RestartScheduled(restart, budget, from_step, held_step, round(pause_s, 3)))
        plan_words = f"starting again from step {from_step}"
        if has_shrunk:
            plan_words = f"going on with {plural(self._num_ranks, 'rank')}"
        elif failure.rank in survivors:
            plan_words = f"going on with what {format_rank_list(sorted(survivors.values()))} hold"
        elif survivors:
            # What the kept ranks hold between them only they can tell, when they have met.
            plan_words = self._describe_start_beside(failure, sorted(survivors.values()))
        plan_words += purpose
        count_words = f"restart {restart} of {budget}"
        if pause_s > 0:
            plan_words += f" in {format_seconds(pause_s)}"
            limit = format_seconds(self._spec.outage_s)
            count_words += f"; an outage, which is waited for {limit}: resilience.outage_s"
        self._say(f"{failure.summary}; {plan_words} ({count_words})")

    def _describe_start_beside(self, failure: RankFailure, kept: Sequence[int]) -> str:
        """What starts again beside the `kept` ranks, each by its number unless what failed is all
        of it."""
        started = sorted(set(range(self._num_ranks)) - set(kept))
        if not started and failure.cause == LOST_CONNECTION:
            return f"going on with what {format_rank_list(kept)} hold"
        which = "it"
        if started and started != [failure.rank]:
            which = format_rank_list(started)
        return f"starting {which} again beside {format_rank_list(kept)}"


def _keep_numbers(end: AttemptEnd, failure: RankFailure) -> dict[int, int]:
    """The ranks that wait for the next attempt, each as the rank that it was. Not the one that
    failed, unless that came from outside of its process."""
    failed = set() if failure.is_outage else {failure.rank}
    return {rank: rank for rank in sorted(end.waiting.keys() - failed)}


def _find_held_step(end: AttemptEnd) -> int:
    """The newest step whose state a rank that waits still holds; -1 if none does."""
    return max(end.waiting.values(), default=-1)
