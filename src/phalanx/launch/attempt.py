"""One attempt, from the order to start the ranks to the moment none is left."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from phalanx.core.black_box_reader import read_last_position
from phalanx.core.process_stat import read_state_letter
from phalanx.core.stop_signals import LEAVE_FOR_MORE_RANKS_SIGNAL
from phalanx.core.typed_json import JsonObject
from phalanx.launch.attempt_end import AttemptEnd, RankExit
from phalanx.launch.end_record import EndRecord
from phalanx.launch.hang_verdict import HangVerdict
from phalanx.launch.kill_deadline import KillDeadline
from phalanx.launch.late_exits import LateExits
from phalanx.launch.launch_spec import LaunchSpec
from phalanx.launch.messages import (
    EndRecorded,
    EventRefused,
    KillRanks,
    KillStore,
    RankExited,
    RanksForked,
    RanksNotForked,
    RankWaits,
    SendSignalToRanks,
    ServerReport,
    StartRanks,
    StoreExited,
    WriteStacksToLogs,
)
from phalanx.launch.oom_kills import OomWatch
from phalanx.launch.paths import black_box_path
from phalanx.launch.positions import has_begun_training
from phalanx.launch.processor_lack import ProcessorLack
from phalanx.launch.progress_watch import ProgressWatch
from phalanx.launch.server_process import ServerProcess
from phalanx.launch.signals import SignalInbox
from phalanx.launch.stop_request import StopRequest, describe_stop_on_signal
from phalanx.launch.stopped_ranks import StoppedRanks
from phalanx.launch.stopped_store import StoppedStoreWatch
from phalanx.launch.wire import MessageChannel
from phalanx.observe.where_words import format_rank_list

Order = TypeVar("Order")
Report = TypeVar("Report")
DEADLINE_CHECK_INTERVAL_S = 0.1
# For ranks that said nothing to write their stacks, before they are killed.
WRITE_STACKS_WINDOW_S = 0.5


class ReportAndSignalWaiter:
    """Waits for a report, a signal or the next tick, whichever comes first."""

    def __init__(self, inbox: SignalInbox, on_tick: Callable[[], None]) -> None:
        self._inbox = inbox
        self._on_tick = on_tick
        self._next_tick = 0.0

    def wait(
        self, link: MessageChannel[Order, Report], until: float = math.inf
    ) -> tuple[list[Report], list[int]]:
        """Reports and signals, both possibly none, after `until` (monotonic seconds) or a tick
        at the latest."""
        timeout_s = max(0.0, min(self._next_tick, until) - time.monotonic())
        # Ends of pipes and sockets, so that one call waits for all three.
        sources: list[Any] = [link, self._inbox]
        readable, _, _ = select.select(sources, [], [], timeout_s)
        reports: list[Report] = []
        if link in readable:
            reports = link.receive()
        # By the clock, not by a timeout: reports that come without end must not keep ticks back.
        if time.monotonic() >= self._next_tick:
            self.tick()
        return reports, self._inbox.take_signals()

    def tick(self) -> None:
        """Call `on_tick` now, whenever the last call was."""
        self._on_tick()
        self._next_tick = time.monotonic() + DEADLINE_CHECK_INTERVAL_S


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
        self._deadline = KillDeadline(self.end, num_ranks, spec, stop)
        self._late_exits = LateExits()
        self._has_asked_for_stacks = False
        self._is_store_needed = True
        self._killed_as_hung: set[int] = set()
        self._pids: Sequence[int] = ()
        self._oom = OomWatch()
        self._lack: ProcessorLack | None = None
        self._stopped = StoppedRanks()
        self._killed_as_stopped: set[int] = set()
        self._store = StoppedStoreWatch(0)

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
        self.end.num_kept = len(survivors)
        if self._stop.signal is not None:
            # It came before the ranks met: those that are forked now have not heard of it.
            self._ask_ranks_to_stop()
        while not self._has_attempt_ended():
            until = self._find_next_deadline()
            if self._progress is not None:
                until = min(until, self._progress.find_next_look_s())
            reports, signals = self._waiter.wait(self._server.link, until)
            for report in reports:
                self._handle_server_report(report)
            for number in signals:
                self._handle_signal(number)
            if self._should_tell_ranks_to_leave():
                self.end.was_told_to_leave = True
                self._listener.say(
                    "a checkpoint is there: the ranks save and leave, and phalanx starts all of"
                    " them that the job asks for"
                )
                self._server.link.send(
                    SendSignalToRanks(self.end.number, LEAVE_FOR_MORE_RANKS_SIGNAL)
                )
            self._look_for_stopped_store()
            self._look_for_hang()
            self._look_for_late_exits()
            self._kill_ranks_past_deadline()
        # The server is gone and ranks are not: its end kills them, and no exits come any more.
        if self._server.link.closed and len(self.end.exits) < self._num_ranks:
            self._server.kill()
            self.end.waiting.clear()
            self.end.server_loss = self._server.describe_exit()
        if self._progress is not None:
            self.end.last_seen = self._progress.positions
        return self.end

    def _should_tell_ranks_to_leave(self) -> bool:
        """True once all ranks that the job asks for may be started; not while it is to stop."""
        return (
            self._stop.signal is None
            and not self.end.was_told_to_leave
            and self._spec.attempts.should_grow()
        )

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
            case RanksForked(attempt) if attempt == number:
                self._pids = report.pids
                self._store = StoppedStoreWatch(report.store_pid)
                self._oom.begin(self._pids)
                if self._progress is not None:
                    self._progress.begin_attempt(
                        self._pids, time.monotonic(), self._server.pid, number
                    )
                self._listener.emit_ranks_started(self._pids)
            case RanksNotForked(attempt, error) if attempt == number:
                self.end.start_error = error
            case StoreExited(attempt, code) if attempt == number:
                self._handle_store_loss(f"exit status {code}")
            case EventRefused():
                self._listener.handle_refused_event(report.line)
            case EndRecorded(attempt, rank, record) if attempt == number:
                self._handle_end_record(rank, record)
            case RankWaits(attempt, rank, held_step) if attempt == number:
                self.end.waiting[rank] = held_step
                self._deadline.note_failure(time.monotonic())
            case RankExited(attempt) if attempt == number:
                self._handle_rank_exit(report)

    def _look_for_stopped_store(self) -> None:
        """Kill a store that is stopped: its end is told, and ranks do without it."""
        if self._progress is None or self.end.store_loss:
            return
        if self._store.is_stopped(time.monotonic()):
            self._listener.say("the process that holds the rendezvous store is stopped: killing it")
            # It may have ended since.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._store.pid, signal.SIGKILL)
            self._store = StoppedStoreWatch(0)

    def _handle_store_loss(self, how: str) -> None:
        """Let ranks go on that do not need the store to train: those that come to need it leave
        with what they hold. Before the first step, where nothing of them is kept, or nobody would
        see that they wait for ever, they end now."""
        self.end.store_loss = how
        ranks_go_on = (
            self._progress is not None
            and self._spec.keeps_ranks
            and has_begun_training(self._spec.run_dir, self._num_ranks)
        )
        self._listener.emit_store_lost(how, ranks_go_on=ranks_go_on)
        if not ranks_go_on:
            self._deadline.note_failure(time.monotonic())

    def _handle_end_record(self, rank: int, record: EndRecord) -> None:
        now = time.monotonic()
        self.end.records[rank] = record
        if record.has_failed:
            self._deadline.note_report(now)
        elif record.is_agreed_stop:
            self._deadline.begin_grace(now)
        elif self.end.exits and self.end.is_complete(self._num_ranks):
            # The process of another rank was gone before this one was done.
            self._deadline.begin_last_exits(now)

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
            self._deadline.note_failure(now)
        elif self.end.is_complete(self._num_ranks):
            self._deadline.begin_last_exits(now)

    def _handle_signal(self, number: int) -> None:
        if self._stop.signal is None:
            self._stop.signal, self._stop.asked_s = signal.Signals(number), time.monotonic()
            self._deadline.begin_grace(self._stop.asked_s)
            # It asks the ranks, and says that they have left: steps would be lost without it.
            self._server.continue_if_stopped()
            self._ask_ranks_to_stop()
            is_work_done = self.end.is_work_done(self._num_ranks)
            self._listener.say(
                describe_stop_on_signal(number, self._spec.grace_s, is_work_done=is_work_done)
            )
        elif number == signal.SIGINT:
            self._stop.at_once = True
            # The kernel kills the ranks at the end of the server's pipe, even stopped ones.
            self._server.kill(timeout_s=1.0)

    def _ask_ranks_to_stop(self) -> None:
        self._server.link.send(SendSignalToRanks(self.end.number, self._stop.signal_to_ranks))

    def _look_for_hang(self) -> None:
        """Kill the ranks that keep the others from progress, once there are any: the others then
        notice at once."""
        is_ending = self._deadline.has_failed or self._stop.signal is not None
        if self._progress is None or is_ending:
            return
        hang = self._progress.poll(time.monotonic(), self.end.records.keys(), self.end.exits.keys())
        if hang is None or not self._killed_as_hung.isdisjoint(hang.culprits):
            return
        self._killed_as_hung.update(hang.culprits)
        if self.end.is_complete(self._num_ranks):
            # All is saved: that fails nothing, and the others end as they do without it.
            self._deadline.begin_last_exits(time.monotonic())
        else:
            self.end.hang = hang
            self._deadline.note_failure(time.monotonic())
        self._server.link.send(KillRanks(self.end.number, hang.culprits))
        self._listener.emit_hang_found(hang)

    def _look_for_late_exits(self) -> None:
        """Tell the person who waits for the command what it waits for, once all work is done. A run
        that stops has its grace, which was said."""
        if not self.end.is_work_done(self._num_ranks):
            return
        now = time.monotonic()
        if not self.end.exits:
            if late := self._late_exits.describe_none_left(self._num_ranks, now):
                self._listener.say(late)
            return
        late = self._late_exits.describe(
            self._list_running_ranks(),
            self._deadline.compute_exit_wait_s(now),
            self._deadline.compute_s() - now,
        )
        if late:
            self._listener.say(late)

    def _list_running_ranks(self) -> list[int]:
        return sorted(set(range(self._num_ranks)) - self.end.exits.keys())

    def _find_next_deadline(self) -> float:
        if self._deadline.has_killed:
            return self._deadline.compute_server_due_s()
        return self._deadline.compute_s()

    def _kill_ranks_past_deadline(self) -> None:
        now = time.monotonic()
        if self._has_attempt_ended():
            return
        if self._is_store_needed and self._deadline.waits_for_survivors():
            self._is_store_needed = False
            self._server.link.send(KillStore(self.end.number))
        self._kill_stopped_ranks(now)
        self._look_for_processor_lack(now)
        if self._deadline.has_killed:
            # The server does not answer.
            if now >= self._deadline.compute_server_due_s():
                self._server.kill()
        elif now >= self._deadline.compute_s():
            if self._inspect_silent_ranks_once(now):
                return
            self._deadline.note_kill(now)
            self.end.grace_over = self._deadline.is_grace_over(now)
            if killed := self._late_exits.describe_kill(self._list_running_ranks()):
                self._listener.say(killed)
            at_work = set(range(self._num_ranks)) - self.end.waiting.keys()
            self._server.link.send(KillRanks(self.end.number, tuple(sorted(at_work))))

    def _kill_stopped_ranks(self, now: float) -> None:
        """Kill ranks that are stopped while others leave with what they hold: they cannot leave,
        and those that wait for them in a collective would not either."""
        if not self._deadline.waits_for_survivors() or self._deadline.has_killed:
            return
        gone = self.end.exits.keys() | self.end.waiting.keys() | self._killed_as_stopped
        at_work = {rank: pid for rank, pid in enumerate(self._pids) if rank not in gone}
        stopped = self._stopped.find(at_work, now)
        if stopped:
            self._killed_as_stopped.update(stopped)
            verb = "is" if len(stopped) == 1 else "are"
            who = f"{format_rank_list(sorted(stopped))} {verb} stopped"
            self._listener.say(f"{who} while others leave after a failure: killed")
            self._server.link.send(KillRanks(self.end.number, stopped))

    def _look_for_processor_lack(self, now: float) -> None:
        """Have the survivors of a failure, and then the server, get the time in which they had no
        processor on top."""
        if not (self._deadline.waits_for_survivors() or self._deadline.has_killed):
            return
        at_work = [
            pid
            for rank, pid in enumerate(self._pids)
            if rank not in self.end.exits and rank not in self.end.waiting
        ]
        # What a rank says comes by way of the server.
        pids = [*at_work, self._server.pid]
        if self._lack is None:
            self._lack = ProcessorLack(pids, now)
        self._lack.look(pids, now)
        self._deadline.note_processor_lack(self._lack.total_s)

    def _inspect_silent_ranks_once(self, now: float) -> bool:
        """Once, when ranks failed only because of another one: note the process states of the
        ranks without a report, and ask them for their stacks.

        Returns True if that takes a moment more.
        """
        if (
            self._stop.signal is not None
            or self._has_asked_for_stacks
            or self.end.is_primary_failure_known
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
        self._has_asked_for_stacks = True
        self._deadline.postpone(now + WRITE_STACKS_WINDOW_S)
        self._server.link.send(WriteStacksToLogs(self.end.number, tuple(self.end.silent)))
        return bool(self.end.silent)
