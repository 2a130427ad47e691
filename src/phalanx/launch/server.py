"""The process that forks ranks: itself a fork of one that has imported torch already
(`launch.template`).

Importing torch takes seconds and forking takes milliseconds, so ranks start, and start again after
a crash, at the price of the fork. That is sound only while this process has one thread and has not
touched CUDA: it forks, reaps and reports, and nothing else. User modules are imported in the ranks.

It gets orders and sends reports (`launch.messages`): what a rank says of its own end and the exit
of each rank at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeAlias, assert_never

from phalanx.core.errors import EnvironmentProblem
from phalanx.core.stop_signals import STOP_SIGNALS, hold_stop_signals, stop_ignoring_signals
from phalanx.launch.end_record import EndReader, EndWriter, open_end_pipe
from phalanx.launch.lifeline import die_when_pipes_close
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
    ServerOrder,
    ServerReport,
    StartRanks,
    StoreExited,
    WriteStacksToLogs,
)
from phalanx.launch.next_attempt import NextAttempt, OrderSender, open_order_pipe
from phalanx.launch.rank import STACKS_SIGNAL, RankTask, run_forked_rank
from phalanx.launch.rank_env import RankEnv
from phalanx.launch.reports import build_error_report
from phalanx.launch.store import open_loopback_listener, serve_rendezvous_store
from phalanx.launch.wire import MessageChannel

SupervisorLink: TypeAlias = MessageChannel[ServerReport, ServerOrder]


@dataclass
class AttemptProcesses:
    """The processes of one attempt that have not been reaped: rank by pid, and the store's pid.

    `records`: the pipe of each rank's end record. `orders`: the pipe by which each rank that waits
    hears of the next attempt.
    """

    number: int
    ranks: dict[int, int] = field(default_factory=dict)
    records: dict[int, EndReader] = field(default_factory=dict)
    orders: dict[int, OrderSender] = field(default_factory=dict)
    store_pid: int = 0
    killed: set[int] = field(default_factory=set)


class RankServer:
    """Forks and reaps on behalf of the supervisor at the other end of `link`.

    A scheduler signals every process of the job: the server outlives what asks for a stop.
    `ignored` are the signals that ranks are to ignore, too, for whoever started the command does.
    """

    def __init__(
        self, link: SupervisorLink, supervisor_life: int, run_dir: Path, ignored: frozenset[int]
    ) -> None:
        self._link, self._run_dir, self._ignored = link, run_dir, ignored
        self._supervisor_life = supervisor_life
        self._server_life, self._server_life_write = os.pipe()
        self._wakeup, self._wakeup_write = os.pipe()
        self._attempt = AttemptProcesses(-1)

    def execute_orders_until_closed(self) -> int:
        """Do what the supervisor says until it closes the link."""
        for fd in (self._wakeup, self._wakeup_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore_signal)
        while not self._link.closed:
            records = [record for record in self._attempt.records.values() if record.is_open]
            sources: list[Any] = [self._link, self._wakeup, *records]
            readable, _, _ = select.select(sources, [], [])
            if self._wakeup in readable:
                # Emptied before `_reap_children`: a child that ends after it wakes the next select.
                os.read(self._wakeup, 4096)
            for rank in self._attempt.records:
                self._forward_end_record_and_events(rank)
            self._reap_children()
            if self._link in readable:
                for order in self._link.receive():
                    self._execute_order(order)
        return 0

    def _execute_order(self, order: ServerOrder) -> None:
        """Do what an order says, if it is of this attempt."""
        if not self._is_for_these_ranks(order):
            return
        match order:
            case StartRanks():
                self._fork_attempt_ranks(order)
            case SendSignalToRanks(_, number):
                for pid in self._attempt.ranks:
                    os.kill(pid, number)
            case WriteStacksToLogs(_, ranks):
                for pid, rank in self._attempt.ranks.items():
                    if rank in ranks:
                        os.kill(pid, STACKS_SIGNAL)
            case KillRanks(_, ranks):
                self._kill_ranks(ranks)
            case KillStore():
                self._kill_store_process()
            case _:
                assert_never(order)

    def _is_for_these_ranks(self, order: ServerOrder) -> bool:
        """False for an order of an earlier attempt, whose ranks are gone or others now."""
        if isinstance(order, StartRanks):
            return order.attempt > self._attempt.number
        return order.attempt == self._attempt.number

    def _fork_attempt_ranks(self, order: StartRanks) -> None:
        self._attempt = self._leave_attempt(order)
        try:
            # A new port for each attempt: no rank can read addresses of dead ones.
            listener = open_loopback_listener()
            with listener:
                port = listener.getsockname()[1]
                self._attempt.store_pid = self._fork_child_process(
                    lambda: serve_rendezvous_store(listener)
                )
                for rank in range(order.num_ranks):
                    if rank not in self._attempt.orders:
                        pid = self._fork_rank_process(order, rank, port, listener)
                        self._attempt.ranks[pid] = rank
            for rank in order.kept:
                if rank in self._attempt.orders:
                    self._attempt.orders[rank].send(
                        NextAttempt(order.attempt, port, order.payload, rank, order.num_ranks)
                    )
        except OSError as error:
            self._kill_ranks()
            problem = EnvironmentProblem(
                "the ranks cannot be started", why=os.strerror(error.errno or 0)
            )
            self._link.send(RanksNotForked(self._attempt.number, build_error_report(problem)))
            return
        pid_of_rank = {rank: pid for pid, rank in self._attempt.ranks.items()}
        pids = tuple(pid_of_rank[rank] for rank in sorted(pid_of_rank))
        self._link.send(RanksForked(self._attempt.number, pids, self._attempt.store_pid))

    def _leave_attempt(self, order: StartRanks) -> AttemptProcesses:
        """The processes of the next attempt so far: those of the last one that are kept."""
        last, following = self._attempt, AttemptProcesses(order.attempt)
        number_of = dict(zip(order.kept_from, order.kept, strict=True))
        for pid, rank in last.ranks.items():
            if rank in number_of:
                following.ranks[pid] = number_of[rank]
                following.records[number_of[rank]] = last.records.pop(rank)
                following.orders[number_of[rank]] = last.orders.pop(rank)
            else:
                _kill_child_and_group(pid)
        for reader in last.records.values():
            reader.close()
        for sender in last.orders.values():
            sender.close()
        # Its keys are those of ranks that are gone.
        self._kill_store_process()
        return following

    def _fork_rank_process(
        self, order: StartRanks, rank: int, port: int, listener: socket.socket
    ) -> int:
        size = order.num_ranks
        ranks = RankEnv(rank, size, local_rank=rank, local_world_size=size, attempt=order.attempt)
        task = RankTask(order.entry, order.payload, self._run_dir, ranks, port, order.doing)
        # Beside ranks that hold the state a signal is a request, before it has handlers, too: its
        # death would end the attempt, and what they hold be lost.
        holds_signals = bool(order.kept)
        self._attempt.records[rank], write_end = open_end_pipe()
        self._attempt.orders[rank], orders = open_order_pipe()

        def run() -> int:
            # The store's process alone listens: the port dies with it.
            listener.close()
            for record in self._attempt.records.values():
                record.close()
            for sender in self._attempt.orders.values():
                sender.close()
            return run_forked_rank(task, EndWriter(write_end), orders)

        try:
            return self._fork_child_process(run, holds_signals=holds_signals)
        finally:
            # The rank alone holds them, so that the pipes end with the rank.
            os.close(write_end)
            orders.close()

    def _forward_end_record_and_events(self, rank: int) -> None:
        """Forward a rank's end record, if it has written one by now, and events that its disk
        refused."""
        reader = self._attempt.records[rank]
        record = reader.read_complete_record()
        for line in reader.take_event_lines():
            self._link.send(EventRefused(self._attempt.number, line))
        if record is not None:
            self._link.send(EndRecorded(self._attempt.number, rank, record))
        waiting = reader.take_waiting()
        if waiting is not None:
            self._link.send(RankWaits(waiting.attempt, rank, waiting.held_step))

    def _fork_child_process(self, run: Callable[[], int], *, holds_signals: bool = False) -> int:
        """Start `run` in a process of its own group that dies with the supervisor and with us; its
        pid.

        Signals wait meanwhile: one that arrived before the child dropped our handlers would be
        lost. With `holds_signals` those that ask for a stop wait until the child releases them.
        """
        # What is buffered would be written by the child, too.
        sys.stdout.flush()
        sys.stderr.flush()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            self._run_as_child_process(run, mask, holds_signals=holds_signals)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            # In parent and child: one of them comes first, and both may rely on the group.
            os.setpgid(pid, pid)
        except OSError:
            pass
        return pid

    def _run_as_child_process(
        self,
        run: Callable[[], int],
        mask: set[int | signal.Signals],
        *,
        holds_signals: bool,
    ) -> NoReturn:
        code = 1
        try:
            os.setpgid(0, 0)
            # The pipe is the server's: a rank's signals must not wake it.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # The server ignores it. A rank takes it as any program does, until it has a handler.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            stop_ignoring_signals(self._ignored)
            # The supervisor tells ranks of it as SIGTERM.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            self._link.close()
            for fd in (self._server_life_write, self._wakeup, self._wakeup_write):
                os.close(fd)
            die_when_pipes_close([self._supervisor_life, self._server_life], whole_group=True)
            if holds_signals:
                mask |= hold_stop_signals()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            code = run()
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            # Never back into the server's loop.
            os._exit(code)

    def _kill_ranks(self, only: tuple[int, ...] | None = None) -> None:
        # A rank that is dead already was not killed by us.
        self._reap_children()
        for pid, rank in self._attempt.ranks.items():
            if only is None or rank in only:
                self._attempt.killed.add(pid)
                _kill_child_and_group(pid)
        # Else it goes with the last rank.
        if not self._attempt.ranks:
            self._kill_store_process()

    def _kill_store_process(self) -> None:
        if self._attempt.store_pid:
            self._attempt.killed.add(self._attempt.store_pid)
            _kill_child_and_group(self._attempt.store_pid)

    def _reap_children(self) -> None:
        while True:
            try:
                # In a loop: one SIGCHLD may stand for several children.
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._handle_child_exit(pid, os.waitstatus_to_exitcode(status))

    def _handle_child_exit(self, pid: int, code: int) -> None:
        attempt = self._attempt
        if pid == attempt.store_pid:
            attempt.store_pid = 0
            if pid not in attempt.killed:
                self._link.send(StoreExited(attempt.number, code))
        elif pid in attempt.ranks:
            # Helpers that the rank left behind.
            _kill_process_group(pid)
            rank = attempt.ranks.pop(pid)
            # Before the exit: what a rank said of its end decides what its exit means.
            self._forward_end_record_and_events(rank)
            attempt.records[rank].close()
            attempt.orders[rank].close()
            # The signal that asks for a stack kills a rank that had not set a handler yet.
            by_us = code == -STACKS_SIGNAL or (pid in attempt.killed and code == -signal.SIGKILL)
            exit_code: int | None = code
            number: int | None = None
            if code < 0:
                exit_code, number = None, -code
            self._link.send(
                RankExited(
                    attempt=attempt.number,
                    rank=rank,
                    code=exit_code,
                    signal=number,
                    by_us=by_us,
                    died_monotonic_s=time.monotonic(),
                )
            )
            # The store goes last: ranks need it while they save.
            if not attempt.ranks:
                self._kill_store_process()


def _kill_child_and_group(pid: int) -> None:
    """Kill a child that has not been reaped, and its group: code of the user's may have moved it
    into another one."""
    _kill_process_group(pid)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _kill_process_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor needs a Python handler to exist."""
