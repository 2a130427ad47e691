"""One attempt, from the order to start the ranks to the moment none is left.

Facts only; the verdict is elsewhere.
"""

from __future__ import annotations

import math
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from phalanx.core.black_box_reader import LastPosition, read_last_position
from phalanx.core.process_stat import read_state_letter
from phalanx.core.typed_json import JsonObject
from phalanx.launch.end_record import EndRecord
from phalanx.launch.launch_spec import LaunchSpec
from phalanx.launch.messages import (
    EndRecorded,
    EventRefused,
    ForkFailed,
    KillRanks,
    KillStore,
    RankExited,
    RanksForked,
    RankWaits,
    SendSignalToRanks,
    ServerReport,
    StartRanks,
    StoreExited,
    WriteStacksToLogs,
)
from phalanx.launch.oom_kills import OomKill, OomWatch
from phalanx.launch.paths import black_box_path
from phalanx.launch.progress_watch import HangVerdict, ProgressWatch
from phalanx.launch.reports import ErrorReport
from phalanx.launch.server_process import ServerLink, ServerProcess
from phalanx.launch.signals import SignalInbox

DEADLINE_CHECK_INTERVAL_S = 0.1
# After the first failure, where ranks are kept: how long those that still run may take to notice,
# leave their groups and wait for the next attempt.
WAIT_FOR_ATTEMPT_WINDOW_S = 3.0
# After the first failure: how long others may take to report theirs, while only consequences are
# known, or the cause.
SUSPECT_WINDOW_S, CAUSE_WINDOW_S = 1.0, 0.3
# After the first report of a rank that does not end by itself: its way out, or its sinks', may wait
# for the others.
EXIT_AFTER_REPORT_WINDOW_S = 3.0
# While stopping, after the first rank left with an error: the save can no longer succeed.
EXIT_AFTER_FAILED_STOP_S = 5.0
EXIT_AFTER_KILL_TIMEOUT_S = 2.0
# After the first rank left a run that all say is done: longer than a rank's sinks may take. A rank
# that others left in a collective of the sample would stay until the collective's time is over.
EXIT_AFTER_DONE_WINDOW_S = 90.0
# For ranks that said nothing to write their stacks, before they are killed.
WRITE_STACKS_WINDOW_S = 0.5


@dataclass(frozen=True)
class RankExit:
    """The end of a rank's process: a code or a signal.

    `by_us`: it was still alive when we killed the rest. `oom_kill`: the kernel killed it for
    memory; `is_oom_known`: it would be known if it had.
    """

    rank: int
    code: int | None
    signal: int | None
    by_us: bool
    died_monotonic_s: float
    detected_s: float
    oom_kill: OomKill | None = None
    is_oom_known: bool = False


@dataclass
class StopRequest:
    """A request to stop, once there is one: SIGINT, SIGTERM or SIGHUP. `at_once`: Ctrl-C a second
    time."""

    signal: signal.Signals | None = None
    at_once: bool = False

    @property
    def signal_to_ranks(self) -> int:
        """What the ranks are told: they know two kinds of stops, SIGINT and SIGTERM."""
        return int(signal.SIGINT if self.signal == signal.SIGINT else signal.SIGTERM)


@dataclass
class AttemptEnd:
    """The facts when no rank is at work any more: how each process ended, and the end record that
    each rank had written before."""

    number: int
    exits: dict[int, RankExit] = field(default_factory=dict)
    records: dict[int, EndRecord] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)
    """Process state (`read_state_letter`) of each rank that had said nothing when others failed by
    its absence alone."""
    silent_places: dict[int, LastPosition] = field(default_factory=dict)
    """The places of these ranks then: the question for their stacks may wake them."""
    start_error: ErrorReport | None = None
    server_loss: str = ""
    store_loss: str = ""
    grace_over: bool = False
    stepless: str = ""
    """The work of ranks without steps, say "evaluating"."""
    was_told_to_leave: bool = False
    """The ranks were asked to save and leave, for an attempt with another number of them."""
    hang: HangVerdict | None = None
    """Why the ranks made no progress, where that ended the attempt."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Ranks that lost another one and wait for the next attempt, and the step whose state each of
    them holds; -1: none."""

    @property
    def error_reports(self) -> dict[int, ErrorReport]:
        """The error reports of the ranks that wrote one."""
        reports = {}
        for rank, record in self.records.items():
            if record.report is not None:
                reports[rank] = record.report
        return reports

    @property
    def exit_codes(self) -> set[int | None]:
        """The codes in the ranks' end records; None for ranks that ended without a record, or
        failed."""
        codes: set[int | None] = set()
        for rank in self.exits.keys() | self.waiting.keys():
            record = self.records.get(rank)
            if record is None or record.report is not None:
                codes.add(None)
            else:
                codes.add(record.code)
        return codes

    def has_rank_failed_or_died(self, rank: int) -> bool:
        """True for a rank that reports so, and for a process that ended before its rank had
        reported that its work is done.

        Its exit code does not matter: any line of code can make it.
        """
        if rank in self.records:
            return self.records[rank].has_failed
        # One that we killed might have reported its end a moment later.
        return rank in self.exits and not self.exits[rank].by_us

    def is_complete(self, num_ranks: int) -> bool:
        """True if each of the `num_ranks` ranks has reported an end, and none a failure."""
        if len(self.records) < num_ranks:
            return False
        return not any(record.has_failed for record in self.records.values())


class ReportAndSignalWaiter:
    """Waits for a report, a signal or the next tick, whichever comes first."""

    def __init__(self, inbox: SignalInbox, on_tick: Callable[[], None]) -> None:
        self._inbox = inbox
        self._on_tick = on_tick
        self._next_tick = 0.0

    def wait(
        self, link: ServerLink, until: float = math.inf
    ) -> tuple[list[ServerReport], list[int]]:
        """Reports and signals, both possibly none, after `until` (monotonic seconds) or a tick
        at the latest."""
        timeout_s = max(0.0, min(self._next_tick, until) - time.monotonic())
        # Ends of pipes and sockets, so that one call waits for all three.
        sources: list[Any] = [link, self._inbox]
        readable, _, _ = select.select(sources, [], [], timeout_s)
        reports = []
        if link in readable:
            reports = link.receive()
        # By the clock, not by a timeout: reports that come without end must not keep ticks back.
        if time.monotonic() >= self._next_tick:
            self._on_tick()
            self._next_tick = time.monotonic() + DEADLINE_CHECK_INTERVAL_S
        return reports, self._inbox.take_signals()


class AttemptListener(Protocol):
    """Hears what happens in an attempt while it lasts."""

    def say(self, line: str) -> None:
        """A line for the person."""
        ...

    def emit_ranks_started(self, pids: Sequence[int]) -> None:
        """The ranks have a process each, in the order of `pids`."""
        ...

    def handle_refused_event(self, line: str) -> None:
        """The line of a rank's event that the disk did not take."""
        ...

    def emit_hang_found(self, hang: HangVerdict) -> None:
        """Ranks keep the others from progress, and are killed now."""
        ...

    def emit_store_lost(self, how: str, *, ranks_go_on: bool) -> None:
        """The process that holds the ranks' rendezvous store ended, as `how` says."""
        ...


class AttemptWatch:
    """Drives one attempt through `server`. `stop` outlives it and is shared with the supervisor."""

    def __init__(
        self,
        number: int,
        num_ranks: int,
        spec: LaunchSpec,
        server: ServerProcess,
        waiter: ReportAndSignalWaiter,
        stop: StopRequest,
        listener: AttemptListener,
        progress: ProgressWatch | None = None,
    ) -> None:
        self.end = AttemptEnd(number, stepless=spec.stepless)
        self._progress, self._listener = progress, listener
        if progress is not None:
            # Until the ranks are forked there is nothing to look at.
            progress.begin_attempt((), time.monotonic())
        self._num_ranks, self._spec = num_ranks, spec
        self._server, self._waiter, self._stop = server, waiter, stop
        self._first_failure_at = math.inf
        self._first_report_at = math.inf
        self._grace_until = math.inf
        self._killed_at = math.inf
        self._stacks_until = -math.inf
        self._is_store_needed = True
        self._killed_as_hung: set[int] = set()
        self._pids: Sequence[int] = ()
        self._oom = OomWatch()

    def watch_until_end(self, payload: JsonObject, survivors: Mapping[int, int]) -> AttemptEnd:
        """Start the ranks, and return when all are gone or wait for the next attempt.

        `survivors`: the ranks of the attempt before whose processes go on, and which ranks they are
        in this one.
        """
        order = StartRanks(
            self.end.number,
            self._num_ranks,
            self._spec.entry,
            payload,
            self.end.stepless or "training",
            kept=tuple(survivors.values()),
            kept_from=tuple(survivors),
        )
        self._server.link.send(order)
        while not self._has_attempt_ended():
            until = self._find_next_deadline()
            if self._progress is not None:
                until = min(until, self._progress.find_next_look_s())
            reports, signals = self._waiter.wait(self._server.link, until)
            for report in reports:
                self._handle_server_report(report)
            for number in signals:
                self._handle_signal(number)
            if not self.end.was_told_to_leave and self._spec.attempts.should_grow():
                self.end.was_told_to_leave = True
                self._server.link.send(SendSignalToRanks(int(signal.SIGTERM)))
            self._look_for_hang()
            self._kill_ranks_past_deadline()
        # The server is gone and ranks are not: its end kills them, and no exits come any more.
        if self._server.link.closed and len(self.end.exits) < self._num_ranks:
            self._server.kill()
            self.end.waiting.clear()
            self.end.server_loss = self._server.describe_exit()
        return self.end

    def _has_attempt_ended(self) -> bool:
        return (
            self._server.link.closed
            or len(self.end.exits.keys() | self.end.waiting.keys()) == self._num_ranks
            or self.end.start_error is not None
        )

    def _handle_server_report(self, report: ServerReport) -> None:
        """Take note of a report. Late reports of an earlier attempt are ignored."""
        number = self.end.number
        match report:
            case RanksForked():
                self._pids = report.pids
                self._oom.begin(self._pids)
                if self._progress is not None:
                    self._progress.begin_attempt(self._pids, time.monotonic())
                self._listener.emit_ranks_started(self._pids)
            case ForkFailed():
                self.end.start_error = report.report
            case StoreExited(attempt, code) if attempt == number:
                self._handle_store_loss(f"exit status {code}")
            case EventRefused():
                self._listener.handle_refused_event(report.line)
            case EndRecorded(attempt, rank, record) if attempt == number:
                self._handle_end_record(rank, record)
            case RankWaits(attempt, rank, held_step) if attempt == number:
                self.end.waiting[rank] = held_step
                self._first_failure_at = min(self._first_failure_at, time.monotonic())
            case RankExited(attempt) if attempt == number:
                self._handle_rank_exit(report)

    def _handle_store_loss(self, how: str) -> None:
        """Let ranks go on that do not need the store to train: those that come to need it leave
        with what they hold. Before the first step, where nothing of them is kept, or nobody would
        see that they wait for ever, they end now."""
        self.end.store_loss = how
        ranks_go_on = (
            self._progress is not None and self._spec.keeps_ranks and self._has_begun_training()
        )
        self._listener.emit_store_lost(how, ranks_go_on=ranks_go_on)
        if not ranks_go_on:
            self._first_failure_at = min(self._first_failure_at, time.monotonic())

    def _handle_end_record(self, rank: int, record: EndRecord) -> None:
        now = time.monotonic()
        self.end.records[rank] = record
        if record.has_failed:
            self._first_report_at = min(self._first_report_at, now)
        elif record.is_agreed_stop:
            # The ranks agreed to leave; one that stays behind does not stay for ever.
            self._grace_until = min(self._grace_until, now + self._spec.grace_s)

    def _handle_rank_exit(self, exited: RankExited) -> None:
        now = time.monotonic()
        oom_kill = None
        if exited.signal == signal.SIGKILL and not exited.by_us:
            oom_kill = self._oom.find_kill(exited.rank)
        rank_exit = RankExit(
            rank=exited.rank,
            code=exited.code,
            signal=exited.signal,
            by_us=exited.by_us,
            died_monotonic_s=exited.died_monotonic_s,
            detected_s=max(0.0, now - exited.died_monotonic_s),
            oom_kill=oom_kill,
            is_oom_known=exited.rank in self._oom.ranks,
        )
        self.end.exits[rank_exit.rank] = rank_exit
        self.end.waiting.pop(rank_exit.rank, None)
        if self.end.has_rank_failed_or_died(rank_exit.rank):
            self._first_failure_at = min(self._first_failure_at, now)
        elif self.end.is_complete(self._num_ranks):
            self._grace_until = min(self._grace_until, now + EXIT_AFTER_DONE_WINDOW_S)

    def _handle_signal(self, number: int) -> None:
        if self._stop.signal is None:
            self._stop.signal = signal.Signals(number)
            self._grace_until = min(self._grace_until, time.monotonic() + self._spec.grace_s)
            self._server.link.send(SendSignalToRanks(self._stop.signal_to_ranks))
            self._listener.say(describe_stop_on_signal(number, self._spec.grace_s))
        elif number == signal.SIGINT:
            self._stop.at_once = True
            # The kernel kills the ranks at the end of the server's pipe, even stopped ones.
            self._server.kill(timeout_s=1.0)

    def _look_for_hang(self) -> None:
        """Kill the ranks that keep the others from progress, once there are any: the others then
        notice at once."""
        has_failed = not math.isinf(min(self._first_failure_at, self._first_report_at))
        if self._progress is None or has_failed or self._stop.signal is not None:
            return
        hang = self._progress.poll(time.monotonic(), self.end.records.keys(), self.end.exits.keys())
        if hang is None or not self._killed_as_hung.isdisjoint(hang.culprits):
            return
        self._killed_as_hung.update(hang.culprits)
        if self.end.is_complete(self._num_ranks):
            # All is saved: that fails nothing, and the others end as they do without it.
            until = time.monotonic() + EXIT_AFTER_DONE_WINDOW_S
            self._grace_until = min(self._grace_until, until)
        else:
            self.end.hang = hang
            self._first_failure_at = time.monotonic()
        self._server.link.send(KillRanks(hang.culprits))
        self._listener.emit_hang_found(hang)

    def _find_kill_time_of_remaining_ranks(self) -> float:
        """The time (monotonic seconds) at which remaining ranks must be killed, as things stand."""
        failed_at = min(self._first_failure_at, self._first_report_at + EXIT_AFTER_REPORT_WINDOW_S)
        # Never before the stacks are written; otherwise whatever ends first.
        return max(
            self._stacks_until,
            min(self._grace_until, failed_at + self._compute_kill_delay_after_failure_s()),
        )

    def _compute_kill_delay_after_failure_s(self) -> float:
        num_heard = len(self.end.exits.keys() | self.end.records.keys())
        if self._waits_for_survivors():
            return WAIT_FOR_ATTEMPT_WINDOW_S
        # No rank is left that could tell us more.
        if num_heard == self._num_ranks and self._first_failure_at < math.inf:
            return CAUSE_WINDOW_S
        if self._stop.signal is not None and self._has_begun_training():
            return EXIT_AFTER_FAILED_STOP_S
        if self._stop.signal is not None or self._is_primary_failure_known():
            return CAUSE_WINDOW_S
        return SUSPECT_WINDOW_S

    def _waits_for_survivors(self) -> bool:
        """True once a rank has failed by itself, where the others are kept."""
        return (
            self._spec.keeps_ranks
            and self._stop.signal is None
            and self._is_primary_failure_known()
        )

    def _is_primary_failure_known(self) -> bool:
        """True if an error or a death of this attempt is no mere consequence of another one.

        False, too, after an abort alone: NCCL's watchdog ends a process because of another one.
        """
        end, reports = self.end, self.end.error_reports
        if end.hang is not None or end.store_loss:
            return True
        for rank, rank_exit in end.exits.items():
            died_silently = end.has_rank_failed_or_died(rank) and rank not in reports
            if died_silently and rank_exit.signal != signal.SIGABRT:
                return True
        return any(not report.secondary for report in reports.values())

    def _find_next_deadline(self) -> float:
        if math.isinf(self._killed_at):
            return self._find_kill_time_of_remaining_ranks()
        return self._killed_at + EXIT_AFTER_KILL_TIMEOUT_S

    def _kill_ranks_past_deadline(self) -> None:
        now = time.monotonic()
        if self._has_attempt_ended():
            return
        if self._is_store_needed and self._waits_for_survivors():
            self._is_store_needed = False
            self._server.link.send(KillStore())
        if math.isinf(self._killed_at) and now >= self._find_kill_time_of_remaining_ranks():
            if self._inspect_silent_ranks_once(now):
                return
            self._killed_at = now
            self.end.grace_over = now >= self._grace_until
            at_work = set(range(self._num_ranks)) - self.end.waiting.keys()
            self._server.link.send(KillRanks(tuple(sorted(at_work))))
        # The server does not answer.
        elif now >= self._killed_at + EXIT_AFTER_KILL_TIMEOUT_S:
            self._server.kill()

    def _inspect_silent_ranks_once(self, now: float) -> bool:
        """Once, when ranks failed only because of another one: note the process states of the
        ranks without a report, and ask them for their stacks.

        Returns True if that takes a moment more.
        """
        if (
            self._stop.signal is not None
            or not math.isinf(self._stacks_until)
            or self._is_primary_failure_known()
        ):
            return False
        heard_of = self.end.exits.keys() | self.end.records.keys()
        # Before their stacks are asked for: the signal changes states and places.
        for rank, pid in enumerate(self._pids):
            if rank not in heard_of:
                self.end.silent[rank] = read_state_letter(pid)
        for rank in self.end.silent:
            last_seen = read_last_position(black_box_path(self._spec.run_dir, rank))
            if last_seen is not None:
                self.end.silent_places[rank] = last_seen
        self._stacks_until = now + WRITE_STACKS_WINDOW_S
        self._server.link.send(WriteStacksToLogs(tuple(self.end.silent)))
        return bool(self.end.silent)

    def _has_begun_training(self) -> bool:
        for rank in range(self._num_ranks):
            last_seen = read_last_position(black_box_path(self._spec.run_dir, rank))
            if last_seen is not None and last_seen.step >= 1:
                return True
        return False


def describe_stop_on_signal(number: int, grace_s: float) -> str:
    """What is said when a signal asks for a stop."""
    if number == signal.SIGINT:
        return "stopping after this step and saving; press Ctrl-C again to stop at once"
    name = name_stop_signal(number)
    return f"{name}: stopping after this step and saving, within {grace_s:g} s"


def name_stop_signal(number: int) -> str:
    """ "SIGTERM"; of one that people do not send by name, what it means."""
    name = signal.Signals(number).name
    if number == signal.SIGHUP:
        name += " (the terminal was closed)"
    return name
