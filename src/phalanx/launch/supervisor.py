"""The supervisor: starts the ranks, watches them, starts them again after a crash, stops them when
asked, and returns how it ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from phalanx.core.errors import EXIT_CODE_MEANING, ExitCode, RestartBudgetError
from phalanx.core.roll_back import RollBack
from phalanx.core.typed_json import JsonConvertible
from phalanx.launch.attempt import AttemptEnd, AttemptWatch, ReportAndSignalWaiter, StopRequest
from phalanx.launch.end_record import STOPPED_EXIT_CODES
from phalanx.launch.hang_limits import HangSettings
from phalanx.launch.messages import (
    PreloadBeginsCuda,
    PreloadFailed,
    PreloadFinished,
    PreloadModules,
)
from phalanx.launch.paths import clear_black_boxes, next_attempt_number, redact_secrets_in_logs
from phalanx.launch.progress_watch import HangVerdict, ProgressWatch
from phalanx.launch.reports import ErrorReport
from phalanx.launch.restarts import FAILED_STARTS_LIMIT, FailedStarts, RestartPolicy
from phalanx.launch.server_process import ServerProcess, start_server
from phalanx.launch.signals import SignalInbox
from phalanx.launch.verdict import OUT_OF_MEMORY, RankFailure, find_root_failure
from phalanx.observe.bus import Bus
from phalanx.observe.events import (
    HangFound,
    LayoutChanged,
    Note,
    RankFailed,
    RanksStarted,
    RestartScheduled,
    RolledBack,
)
from phalanx.observe.where_words import format_rank_list

# A job that another one has taken over, or whose disk refuses, is not to be queued again: a person
# must act first.
FINAL_EXIT_CODES_WHILE_STOPPING = (ExitCode.RUN_LOCKED, ExitCode.RESOURCES)


class ElasticRanks(Protocol):
    """Chooses the number of ranks of the next attempt; the payload of that is laid out so."""

    def shrink(self) -> int | None:
        """Go on with fewer ranks; None where that is not possible."""
        ...

    def should_grow(self) -> bool:
        """True if it is time to try all ranks again."""
        ...

    def grow(self) -> int: ...

    def describe_last_change(self) -> str: ...


@dataclass(frozen=True)
class LaunchSpec:
    """The entry to run, in how many ranks, and with which limits.

    `entry` is "package.module:function", called in each rank as `function(payload, link) -> exit
    code` with the JSON of a payload and a RankLink; `preload` names the modules that are imported
    once, before the first fork. `max_restarts` holds per `restart_window_s`; `grace_s` is how long
    the ranks may take to save after SIGTERM or Ctrl-C.
    """

    entry: str
    payload_of_attempt: Callable[[], JsonConvertible]
    """Makes the payload of an attempt, right before its ranks start."""
    num_ranks: int
    run_dir: Path
    preload: tuple[str, ...]
    stepless: str = ""
    """The work of ranks without steps, say "evaluating": they are started once, not again.

    Empty for ranks that train.
    """
    max_restarts: int = 3
    restart_window_s: float = 3600.0
    grace_s: float = 25.0
    elastic: ElasticRanks | None = None
    """Lays the run out again where ranks do not come back; None: all ranks, or none."""
    on_roll_back: Callable[[RollBack], None] = lambda roll_back: None
    """Told how far all ranks agreed to go back, before the payload of the next attempt is made."""
    lessen_memory: Callable[[], str] = lambda: ""
    """After a rank was out of memory: change the payload so that the next attempt needs less, and
    say how; empty where the run is to end."""
    advise_on_memory: Callable[[], Sequence[str]] = tuple
    """Lines on what would need less memory, for the person whose run ends by that."""
    keeps_ranks: bool = False
    """The entry can take part in several attempts: ranks that only lost another one keep their
    process when it is started again."""
    hangs: HangSettings | None = None
    """How ranks without progress are found; None: they are not looked for."""


@dataclass(frozen=True)
class RunOutcome:
    """The end of a supervised run.

    `status` is "finished" | "preempted" | "interrupted" | "failed"; `message` is for a person.
    """

    exit_code: int
    status: str
    message: str
    attempts: int
    restarts: int = 0
    """How often the ranks were started again because one of them had failed."""


def supervise_ranks(
    spec: LaunchSpec,
    *,
    bus: Bus,
    on_tick: Callable[[], None] = lambda: None,
    say: Callable[[str], None],
    newest_step: Callable[[], int] = lambda: 0,
    on_refused_event: Callable[[str], None] = lambda line: None,
) -> RunOutcome:
    """Run the ranks of `spec` to their end; nothing that it started is left when it returns or
    raises.

    `on_tick` is called about ten times a second, `say` with lines for the person. `newest_step` is
    the step of the newest checkpoint, from which a restart continues. `on_refused_event` gets the
    lines of ranks' events that the disk did not take. `bus` is the supervisor's (rank -1). Raises
    PhalanxError if the run directory cannot be written.
    """
    with SignalInbox() as inbox:
        supervisor = _Supervisor(
            spec,
            bus,
            ReportAndSignalWaiter(inbox, on_tick),
            _ignore_os_errors_of_say(say),
            newest_step,
            on_refused_event,
        )
        try:
            outcome = supervisor.run_until_end()
            return replace(outcome, restarts=supervisor.num_restarts)
        finally:
            supervisor.close()
            on_tick()


class _Supervisor:
    def __init__(
        self,
        spec: LaunchSpec,
        bus: Bus,
        waiter: ReportAndSignalWaiter,
        say: Callable[[str], None],
        newest_step: Callable[[], int],
        on_refused_event: Callable[[str], None],
    ) -> None:
        self._spec, self._bus, self._waiter = spec, bus, waiter
        self._say, self._newest_step, self._on_refused_event = say, newest_step, on_refused_event
        self._server: ServerProcess | None = None
        self._stop = StopRequest()
        self._policy = RestartPolicy(spec.max_restarts, spec.restart_window_s)
        self._num_attempts = 0
        self._num_ranks = spec.num_ranks
        self._failed_starts = FailedStarts()
        self._preload = spec.preload
        self._progress: ProgressWatch | None = None
        if spec.hangs is not None and spec.hangs.is_on and not spec.stepless:
            self._progress = ProgressWatch(spec.run_dir, spec.hangs, bus.emit)

    @property
    def num_restarts(self) -> int:
        return self._policy.num_restarts

    def run_until_end(self) -> RunOutcome:
        # Numbers go on over jobs: logs and events of an earlier one are not written over.
        number = next_attempt_number(self._spec.run_dir)
        kept: dict[int, int] = {}
        while True:
            self._num_attempts += 1
            end = self._run_attempt(number, kept)
            self._redact_secrets_in_logs(end)
            failure = find_root_failure(end, self._spec.run_dir)
            if self._stop.signal is not None:
                return self._build_outcome_of_stop_request(end, failure)
            if failure is None and end.was_told_to_leave and end.exit_codes != {ExitCode.OK}:
                self._grow()
                kept, number = {}, number + 1
                continue
            if failure is None:
                return self._build_outcome_of_ended_ranks(end)
            if failure.roll_back is not None:
                self._go_back(failure.roll_back, failure.summary)
                kept, number = {}, number + 1
                continue
            self._emit_rank_failed(failure)
            if failure.cause == OUT_OF_MEMORY and self._goes_on_with_less_memory(failure):
                kept = {rank: rank for rank in sorted(end.waiting.keys() - {failure.rank})}
                number += 1
                continue
            is_failed_start = self._failed_starts.count(failure, is_restart=self._num_attempts > 1)
            has_shrunk = self._failed_starts.is_rank_gone and self._shrink(failure, end)
            may_try_again = has_shrunk or (is_failed_start and self._spec.elastic is not None)
            if self._spec.stepless or not (failure.restartable or may_try_again):
                report = failure.report
                if failure.cause == OUT_OF_MEMORY:
                    report = "\n".join([report, *self._spec.advise_on_memory()])
                return RunOutcome(int(failure.exit_code), "failed", report, self._num_attempts)
            try:
                self._policy.count_restart_or_raise(failure, time.monotonic())
            except RestartBudgetError as error:
                message = str(error)
                if failure.report != failure.summary:
                    message += f"\n{failure.report}"
                return RunOutcome(int(error.exit_code), "failed", message, self._num_attempts)
            survivors = sorted(end.waiting.keys() - {failure.rank})
            kept = {rank: rank for rank in survivors}
            if has_shrunk:
                # Numbered anew: a gap would be a rank that is not there.
                kept = {rank: number for number, rank in enumerate(survivors[: self._num_ranks])}
            self._announce_restart(failure, kept, max(end.waiting.values(), default=-1))
            number += 1

    def _goes_on_with_less_memory(self, failure: RankFailure) -> bool:
        change = self._spec.lessen_memory()
        if not change:
            return False
        self._bus.emit(Note("memory_lessened", {"why": f"{failure.summary}; {change}"}))
        restart, budget = self._policy.num_restarts, self._spec.max_restarts
        self._bus.emit(RestartScheduled(restart, budget, self._newest_step()))
        self._say(f"{failure.summary}; {change}, and starting again")
        return True

    def _shrink(self, failure: RankFailure, end: AttemptEnd) -> bool:
        """Go on with fewer ranks than now, if the job allows that."""
        num_ranks = self._spec.elastic.shrink() if self._spec.elastic else None
        if num_ranks is None:
            return False
        self._change_num_ranks(
            num_ranks,
            f"rank {failure.rank} failed to start {FAILED_STARTS_LIMIT} times",
            max(end.waiting.values(), default=-1),
        )
        return True

    def _grow(self) -> None:
        assert self._spec.elastic is not None
        num_ranks = self._spec.elastic.grow()
        self._change_num_ranks(num_ranks, "a checkpoint is there, and all ranks are tried again")

    def _change_num_ranks(self, num_ranks: int, why: str, held_step: int = -1) -> None:
        assert self._spec.elastic is not None
        text = self._spec.elastic.describe_last_change()
        step = max(self._newest_step(), held_step)
        self._bus.emit(LayoutChanged(step, self._num_ranks, num_ranks, text, why))
        self._say(f"{text}: {why}")
        self._num_ranks = num_ranks
        self._failed_starts = FailedStarts()

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()

    def _redact_secrets_in_logs(self, end: AttemptEnd) -> None:
        # Of a run that another job has taken, only what these ranks wrote is this job's.
        only_attempt = None
        if any(report.exit_code == ExitCode.RUN_LOCKED for report in end.error_reports.values()):
            only_attempt = end.number
        redact_secrets_in_logs(self._spec.run_dir, os.environ, only_attempt=only_attempt)

    def _run_attempt(self, number: int, kept: Mapping[int, int]) -> AttemptEnd:
        started_at = time.monotonic()
        self._bus.attempt = number
        # Places of the last attempt would be taken for those of this one.
        clear_black_boxes(self._spec.run_dir)
        # One server serves all attempts: torch is imported once.
        if self._server is None or self._server.link.closed:
            unready = self._start_preloaded_server(AttemptEnd(number, stepless=self._spec.stepless))
            if unready is not None:
                return unready
        server = self._server
        assert server is not None

        def on_started(pids: Sequence[int]) -> None:
            self._bus.emit(
                RanksStarted(list(pids), time.monotonic() - started_at, sorted(kept.values()))
            )

        watch = AttemptWatch(
            number,
            self._num_ranks,
            self._spec.run_dir,
            self._spec.grace_s,
            server,
            self._waiter,
            self._stop,
            self._say,
            on_started,
            self._on_refused_event,
            self._spec.stepless,
            self._spec.keeps_ranks,
            self._spec.elastic.should_grow if self._spec.elastic else lambda: False,
            self._progress,
            self._emit_hang_found,
        )
        return watch.watch_until_end(
            self._spec.entry, self._spec.payload_of_attempt().to_json(), kept
        )

    def _start_preloaded_server(self, end: AttemptEnd) -> AttemptEnd | None:
        """Start a server that is ready to fork; None when it is, otherwise how the attempt ended.

        A module that begins to use CUDA when it is imported is left to the ranks: what forks after
        it could not.
        """
        while True:
            self._server = start_server(self._spec.run_dir)
            num_modules = len(self._preload)
            unready = self._preload_modules_in_server(self._server, end)
            if unready is not None or len(self._preload) == num_modules:
                return unready
            self._server.kill()

    def _preload_modules_in_server(
        self, server: ServerProcess, end: AttemptEnd
    ) -> AttemptEnd | None:
        """Have the server import what it must; None when it is ready, or when a module is to be
        left out and another server be started; otherwise how the attempt ended."""
        search_path = tuple(sys.path), os.environ.get("PYTHONPATH")
        server.link.send(PreloadModules(self._spec.run_dir, self._preload, *search_path))
        while not server.link.closed:
            reports, signals = self._waiter.wait(server.link)
            # Before the reports: PreloadFinished may have come in the same moment.
            if signals:
                self._stop.signal = signal.SIGTERM
                if signal.SIGINT in signals:
                    self._stop.signal = signal.SIGINT
                server.kill()
                return end
            for report in reports:
                match report:
                    case PreloadFinished():
                        self._bus.emit(Note("server_ready", asdict(report)))
                        return None
                    case PreloadBeginsCuda(module):
                        self._bus.emit(Note("preload_begins_cuda", {"module": module}))
                        self._preload = tuple(name for name in self._preload if name != module)
                        return None
                    case PreloadFailed(error):
                        end.start_error = error
                        return end
        server.kill()
        end.server_loss = server.describe_exit()
        if "killed" not in end.server_loss:
            end.start_error = _build_server_loss_report(
                end.server_loss, server.read_end_of_server_log()
            )
        return end

    def _build_outcome_of_ended_ranks(self, end: AttemptEnd) -> RunOutcome:
        """The outcome if all ranks report that they finished, or that they agreed to leave because
        one of them was told to."""
        if end.exit_codes == {ExitCode.OK}:
            return RunOutcome(int(ExitCode.OK), "finished", "", self._num_attempts)
        code = ExitCode.INTERRUPTED
        if ExitCode.PREEMPTED in end.exit_codes:
            code = ExitCode.PREEMPTED
        return self._build_outcome_of_stop_code(code, _describe_killed_ranks(end))

    def _build_outcome_of_stop_request(
        self, end: AttemptEnd, failure: RankFailure | None
    ) -> RunOutcome:
        """The outcome after a request to stop.

        Whatever happened on the way, the run is to be continued, not repaired.
        """
        code = ExitCode.PREEMPTED
        if self._stop.at_once or self._stop.signal == signal.SIGINT:
            code = ExitCode.INTERRUPTED
        if self._stop.at_once:
            return self._build_outcome_of_stop_code(
                code, "stopped at once by Ctrl-C; the last checkpoint, if any, stands"
            )
        if end.exit_codes == {ExitCode.OK}:
            return RunOutcome(int(ExitCode.OK), "finished", "", self._num_attempts)
        if not end.exits and not end.waiting:
            return self._build_outcome_of_stop_code(
                code, "stopped before the ranks had started; nothing is lost"
            )
        if failure is not None and failure.step < 1 and failure.cause == "signal":
            return self._build_outcome_of_stop_code(
                code, "stopped before the first step; the last checkpoint, if any, stands"
            )
        if failure is not None and failure.exit_code in FINAL_EXIT_CODES_WHILE_STOPPING:
            self._emit_rank_failed(failure)
            return RunOutcome(int(failure.exit_code), "failed", failure.report, self._num_attempts)
        if failure is not None:
            return self._build_outcome_of_stop_code(
                code, f"failed while stopping; the last checkpoint stands\n{failure.report}"
            )
        return self._build_outcome_of_stop_code(code, _describe_killed_ranks(end))

    def _build_outcome_of_stop_code(self, code: ExitCode, message: str) -> RunOutcome:
        status = "preempted" if code == ExitCode.PREEMPTED else "interrupted"
        return RunOutcome(int(code), status, message or EXIT_CODE_MEANING[code], self._num_attempts)

    def _go_back(self, roll_back: RollBack, summary: str) -> None:
        self._spec.on_roll_back(roll_back)
        self._say(
            f"{summary}; going back to a checkpoint not after step {roll_back.not_after_step}"
        )
        self._bus.emit(
            RolledBack(
                step=roll_back.step,
                cause=roll_back.kind,
                why=roll_back.why,
                not_after_step=roll_back.not_after_step,
                skip_to_sample=roll_back.skip_to_sample,
                failed_rank=roll_back.rank,
            )
        )

    def _emit_rank_failed(self, failure: RankFailure) -> None:
        self._bus.emit(
            RankFailed(
                failed_rank=failure.rank,
                step=failure.step,
                phase=failure.phase,
                cause=failure.cause,
                detail=failure.detail,
                detected_s=failure.detected_s,
                hang_kind=failure.hang_kind,
            )
        )

    def _emit_hang_found(self, hang: HangVerdict) -> None:
        last_seen = hang.positions.get(hang.culprits[0])
        self._bus.emit(
            HangFound(
                hang_kind=hang.kind,
                culprits=list(hang.culprits),
                step=0 if last_seen is None else last_seen.step,
                phase="" if last_seen is None else last_seen.phase,
                collective=hang.collective,
                report="\n".join(hang.report),
                detected_s=hang.detected_s,
                limit_s=hang.limit.quiet_s,
            )
        )

    def _announce_restart(
        self, failure: RankFailure, kept: Mapping[int, int], held_step: int
    ) -> None:
        from_step = self._newest_step()
        restart, budget = self._policy.num_restarts, self._spec.max_restarts
        self._bus.emit(RestartScheduled(restart, budget, from_step, held_step))
        again = f"starting again from step {from_step}"
        if kept:
            # What the kept ranks hold between them only they can tell, when they have met.
            again = f"starting it again beside {format_rank_list(sorted(kept.values()))}"
        self._say(f"{failure.summary}; {again} (restart {restart} of {budget})")


def _describe_killed_ranks(end: AttemptEnd) -> str:
    """The message if ranks had to be killed on the way out; empty if they left by themselves."""
    if end.exit_codes <= {ExitCode.OK, *STOPPED_EXIT_CODES} and not end.grace_over:
        return ""
    return (
        "the ranks did not save within the grace period and were killed; the last checkpoint stands"
    )


def _build_server_loss_report(how: str, last_words: str) -> ErrorReport:
    message = f"the process that starts the ranks {how}"
    return ErrorReport(
        type="",
        message=message,
        traceback=f"{message}\n{last_words}",
        exit_code=ExitCode.INTERNAL,
        is_phalanx_error=False,
        one_line=message,
        secondary=False,
        time_monotonic_s=-1.0,
    )


def _ignore_os_errors_of_say(say: Callable[[str], None]) -> Callable[[str], None]:
    """`say`, but for its OSError: a terminal which is gone does not take the run with it."""

    def speak(line: str) -> None:
        try:
            say(line)
        except OSError:
            pass

    return speak
