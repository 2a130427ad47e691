"""The supervisor: starts the ranks, watches them, starts them again after a crash, stops them when
asked, and returns how it ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from phalanx.core.errors import ExitCode
from phalanx.launch.attempt import AttemptWatch, ReportAndSignalWaiter
from phalanx.launch.attempt_end import AttemptEnd
from phalanx.launch.hang_verdict import HangVerdict
from phalanx.launch.launch_spec import LaunchSpec
from phalanx.launch.messages import (
    EventRefused,
    PreloadBeginsCuda,
    PreloadFailed,
    PreloadFinished,
    PreloadModules,
)
from phalanx.launch.outcome import RunOutcome
from phalanx.launch.paths import clear_black_boxes, next_attempt_number, redact_secrets_in_logs
from phalanx.launch.positions import read_furthest_position
from phalanx.launch.progress_watch import ProgressWatch
from phalanx.launch.recovery import RecoveryPolicy, StartAgain
from phalanx.launch.reports import ErrorReport
from phalanx.launch.server_process import ServerProcess, TemplateProcess, start_template
from phalanx.launch.signals import SignalInbox
from phalanx.launch.stop_request import StopRequest
from phalanx.observe.bus import Bus
from phalanx.observe.events import HangFound, Note, RanksStarted, StoreLost


def supervise_ranks(
    spec: LaunchSpec,
    *,
    bus: Bus,
    on_tick: Callable[[], None] = lambda: None,
    say: Callable[[str], None],
    on_refused_event: Callable[[str], None] = lambda line: None,
) -> RunOutcome:
    """Run the ranks of `spec` to their end; nothing that it started is left when it returns or
    raises.

    `on_tick` is called about ten times a second, `say` with lines for the person.
    `on_refused_event` gets the lines of ranks' events that the disk did not take. `bus` is the
    supervisor's (rank -1). Raises PhalanxError if the run directory cannot be written.
    """
    with SignalInbox() as inbox:
        supervisor = _Supervisor(
            spec,
            bus,
            ReportAndSignalWaiter(inbox, on_tick),
            _ignore_os_errors_of_say(say),
            on_refused_event,
        )
        try:
            return supervisor.run_until_end()
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
        on_refused_event: Callable[[str], None],
    ) -> None:
        self._spec, self._bus, self._waiter = spec, bus, waiter
        self._say, self._on_refused_event = say, on_refused_event
        self._template: TemplateProcess | None = None
        self._server: ServerProcess | None = None
        self._stop = StopRequest()
        self._recovery = RecoveryPolicy(spec, bus, say)
        self._preload = spec.preload
        self._progress: ProgressWatch | None = None
        if spec.hangs is not None and spec.hangs.is_on and not spec.stepless:
            self._progress = ProgressWatch(spec.run_dir, spec.hangs, bus.emit)

    def run_until_end(self) -> RunOutcome:
        # Numbers go on over jobs: logs and events of an earlier one are not written over.
        number = next_attempt_number(self._spec.run_dir)
        ranks = StartAgain(self._spec.num_ranks, {})
        while True:
            end = self._run_attempt(number, ranks)
            # What the ranks recorded last (a checkpoint, say) is to be known for what follows.
            self._waiter.tick()
            self._redact_secrets_in_logs(end)
            match self._recovery.decide(end, self._stop):
                case StartAgain() as ranks:
                    if not self._pause(ranks.pause_s):
                        return self._recovery.end_in_pause(self._stop)
                    number += 1
                case RunOutcome() as outcome:
                    return outcome

    def _pause(self, seconds: float) -> bool:
        """Wait before a restart, while ranks that are kept wait, too; False if a signal asks for a
        stop."""
        until = time.monotonic() + seconds
        while self._server is not None and time.monotonic() < until:
            if self._server.link.closed:
                # What was kept is gone, and nothing is left to wait on.
                return True
            # Reports of the attempt that is over change nothing, but for events.
            reports, signals = self._waiter.wait(self._server.link, until)
            for report in reports:
                if isinstance(report, EventRefused):
                    self._on_refused_event(report.line)
            if signals:
                self._stop.signal = signal.Signals(signals[0])
                return False
        return True

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
        if self._template is not None:
            self._template.kill()

    def _redact_secrets_in_logs(self, end: AttemptEnd) -> None:
        # Of a run that another job has taken, only what these ranks wrote is this job's.
        only_attempt = None
        if any(report.exit_code == ExitCode.RUN_LOCKED for report in end.error_reports.values()):
            only_attempt = end.number
        redact_secrets_in_logs(self._spec.run_dir, os.environ, only_attempt=only_attempt)

    def _run_attempt(self, number: int, ranks: StartAgain) -> AttemptEnd:
        reporter = _AttemptReporter(
            self._bus,
            self._say,
            self._on_refused_event,
            sorted(ranks.survivors.values()),
            self._spec.run_dir,
        )
        self._bus.attempt = number
        # Places of the last attempt would be taken for those of this one.
        clear_black_boxes(self._spec.run_dir)
        # One server serves all attempts, and another one has its imports: torch is imported once.
        if self._server is None or self._server.link.closed:
            unready = self._start_server(AttemptEnd(number, stepless=self._spec.stepless))
            if unready is not None:
                return unready
        assert self._server is not None
        watch = AttemptWatch(
            number,
            ranks.num_ranks,
            self._spec,
            self._server,
            self._waiter,
            self._stop,
            reporter,
            self._progress,
        )
        return watch.watch_until_end(self._spec.attempts.build_payload().to_json(), ranks.survivors)

    def _start_server(self, end: AttemptEnd) -> AttemptEnd | None:
        """Start a server that is ready to fork; None when it is, otherwise how the attempt
        ended."""
        if self._server is not None:
            # It is gone; what it forked is waited for, and its pipes are closed.
            self._server.kill()
        self._server = self._fork_server_of_template()
        if self._server is None:
            unready = self._start_preloaded_template(end)
            if unready is not None:
                return unready
            self._server = self._fork_server_of_template()
        if self._server is None:
            assert self._template is not None
            end.start_error = self._template.fork_failure
            if end.start_error is None:
                return _describe_lost_template(self._template, end)
            return end
        return None

    def _fork_server_of_template(self) -> ServerProcess | None:
        """A fork of the template, if there is one that answers."""
        if self._template is None or self._template.has_ended:
            return None
        return self._template.fork_server()

    def _start_preloaded_template(self, end: AttemptEnd) -> AttemptEnd | None:
        """Start a template that is ready to fork; None when it is, otherwise how the attempt ended.

        A module that begins to use CUDA when it is imported is left to the ranks: what forks after
        it could not.
        """
        while True:
            if self._template is not None:
                self._template.kill()
            self._template = start_template(self._spec.run_dir)
            num_modules = len(self._preload)
            unready = self._preload_modules_in_template(self._template, end)
            if unready is not None or len(self._preload) == num_modules:
                return unready

    def _preload_modules_in_template(
        self, template: TemplateProcess, end: AttemptEnd
    ) -> AttemptEnd | None:
        """Have the template import what it must; None when it is ready, or when a module is to be
        left out and another template be started; otherwise how the attempt ended."""
        search_path = tuple(sys.path), os.environ.get("PYTHONPATH")
        # Absolute: code of the user's may change the directory of a rank that is kept.
        run_dir = self._spec.run_dir.absolute()
        template.link.send(PreloadModules(run_dir, self._preload, *search_path))
        while not template.link.closed:
            reports, signals = self._waiter.wait(template.link)
            # Before the reports: PreloadFinished may have come in the same moment.
            if signals:
                first = signal.SIGINT if signal.SIGINT in signals else signals[0]
                self._stop.signal = signal.Signals(first)
                template.kill()
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
        return _describe_lost_template(template, end)


class _AttemptReporter:
    """Records what happens in an attempt, and tells the person."""

    def __init__(
        self,
        bus: Bus,
        say: Callable[[str], None],
        on_refused_event: Callable[[str], None],
        survivors: list[int],
        run_dir: Path,
    ) -> None:
        self.say, self.handle_refused_event = say, on_refused_event
        self._run_dir = run_dir
        self._bus, self._survivors, self._began_s = bus, survivors, time.monotonic()

    def emit_ranks_started(self, pids: Sequence[int]) -> None:
        start_s = time.monotonic() - self._began_s
        self._bus.emit(RanksStarted(list(pids), start_s, self._survivors))

    def emit_store_lost(self, how: str, *, ranks_go_on: bool) -> None:
        furthest = read_furthest_position(self._run_dir)
        step = 0 if furthest is None else furthest.step
        self._bus.emit(StoreLost(step, how, ranks_go_on))

    def emit_hang_found(self, hang: HangVerdict) -> None:
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
        self.say(f"stacks of all ranks: phalanx report {self._run_dir}")


def _describe_lost_template(template: TemplateProcess, end: AttemptEnd) -> AttemptEnd:
    """The end of an attempt whose ranks nobody could start."""
    template.kill()
    end.server_loss = template.describe_exit()
    if "killed" not in end.server_loss:
        end.start_error = _build_server_loss_report(
            end.server_loss, template.read_end_of_server_log()
        )
    return end


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
