"""The life of a forked rank: it moves into its own log, environment and lifelines, calls the
entry and reports how it ended."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, TypeAlias

from phalanx.core.errors import ExitCode, RunTakenError, StoreTakenError
from phalanx.core.logs import redirect_output_to_log
from phalanx.core.registry import import_object_of_kind
from phalanx.core.secrets import Redactor
from phalanx.core.typed_json import JsonObject
from phalanx.launch.end_record import EndRecord, EndWriter
from phalanx.launch.next_attempt import OrderReceiver
from phalanx.launch.paths import error_report_path, rank_log_path
from phalanx.launch.rank_env import (
    RankEnv,
    build_flight_recorder_variables,
    build_rank_env_variables,
)
from phalanx.launch.rank_link import RankLink
from phalanx.launch.reports import build_error_report

Entry: TypeAlias = Callable[[JsonObject, RankLink], int | None]


@dataclass(frozen=True)
class RankTask:
    """All that one rank needs to know. `doing`: its work, as messages say it."""

    entry: str
    payload: JsonObject
    run_dir: Path
    ranks: RankEnv
    master_port: int
    doing: str = "training"


# Has a rank write its main thread's stack to its log, also while C code holds the interpreter's
# lock. Schedulers send SIGUSR1 and SIGUSR2; this one is left alone.
STACKS_SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
# The line with which faulthandler begins.
STACK_FIRST_LINE = "Stack (most recent call first):"


class _SupervisedRankLink:
    """The RankLink of a supervised rank: the pipe in which it says how it ends, and the one in
    which it hears of the next attempt. `task` is that of the attempt it takes part in."""

    def __init__(self, task: RankTask, end: EndWriter, orders: OrderReceiver) -> None:
        self.task, self._end, self._orders = task, end, orders

    def report_error(self, error: BaseException) -> None:
        _report_rank_failure(self.task, error, self._end)

    def report_work_done(self) -> None:
        self._end.write_end_record(EndRecord(int(ExitCode.OK)))

    def forward_refused_event(self, line: str) -> None:
        self._end.forward_refused_event(line)

    def wait_for_next_attempt(self, held_step: int) -> JsonObject | None:
        if not self._end.is_rank_process:
            return None
        left = self.task.ranks.attempt
        self._end.write_waiting(left, held_step)
        order = self._orders.wait()
        while order is not None and order.attempt <= left:
            order = self._orders.wait()
        if order is None:
            return None
        ranks = RankEnv(
            order.rank,
            order.num_ranks,
            local_rank=order.rank,
            local_world_size=order.num_ranks,
            attempt=order.attempt,
        )
        self.task = replace(
            self.task, payload=order.payload, ranks=ranks, master_port=order.master_port
        )
        _move_into_attempt(self.task)
        return order.payload


def run_forked_rank(task: RankTask, end: EndWriter, orders: OrderReceiver) -> int:
    """Call the entry and write to `end` how it ended.

    Returns the exit code of the process, which the supervisor does not believe. The entry is called
    as `entry(payload, link)`. One whose way out may block, because other ranks or threads take part
    in it, reports its error on the RankLink before it cleans up.
    """
    link = _SupervisedRankLink(task, end, orders)
    try:
        _redirect_stdin_to_devnull()
        # The end of a thread loads it, and ends the process where there is no memory for that.
        with contextlib.suppress(OSError):
            ctypes.CDLL("libgcc_s.so.1")
        _move_into_attempt(task)
        entry: Entry = import_object_of_kind(task.entry, "phalanx", "")
        # What a process can exit with has 8 bits.
        code = int(entry(task.payload, link) or 0) & 0xFF
        # Before `_finish`, which may block: the work is done whatever comes after.
        end.write_end_record(EndRecord(code))
        _run_interpreter_exit_handlers()
        return code
    except KeyboardInterrupt as interrupt:
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            # No signal made it: user code raised it.
            return _report_rank_failure(link.task, interrupt, end)
        # The entry did not catch it: die of it, as any program does.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return ExitCode.INTERRUPTED
    except BaseException as error:
        # torch raises some errors that are no Exception; and sys.exit is no way to finish.
        return _report_rank_failure(link.task, error, end)


def _move_into_attempt(task: RankTask) -> None:
    """Take over the log and the environment variables of the attempt of `task`."""
    redirect_output_to_log(
        rank_log_path(task.run_dir, task.ranks.rank, task.ranks.attempt),
        Redactor(os.environ),
        with_times=True,
    )
    faulthandler.enable(2)
    # Descriptor 2 is the rank's log since `redirect_output_to_log`.
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=False)
    os.environ.update(build_rank_env_variables(task.ranks, task.master_port, os.environ))
    trace = task.run_dir / "logs" / f"nccl-attempt-{task.ranks.attempt:02d}-rank-"
    os.environ.update(build_flight_recorder_variables(trace, os.environ))


def _redirect_stdin_to_devnull() -> None:
    # All ranks would share one input: none may read from it.
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)


def _report_rank_failure(task: RankTask, error: BaseException, end: EndWriter) -> int:
    """Report why this rank failed: to the supervisor first, then in its log and in a file."""
    report = build_error_report(error, task.run_dir, task.doing)
    # A fork of the rank, or an error on the way out of one that is reported: the first one counts.
    if not end.is_rank_process or (end.record is not None and end.record.report is not None):
        return report.exit_code
    # The pipe first: the log and the file lie on a disk that may refuse.
    end.write_end_record(EndRecord(report.exit_code, report))
    if isinstance(error, RunTakenError) and not isinstance(error, StoreTakenError):
        # The folder of its log and report is another job's.
        return report.exit_code
    print(report.traceback, file=sys.stderr, end="")
    try:
        report.write_report_file(
            error_report_path(task.run_dir, task.ranks.rank, task.ranks.attempt)
        )
    except OSError:
        # A full disk, say; the supervisor has the report.
        traceback.print_exc()
    return report.exit_code


def exit_rank_without_teardown(code: int) -> NoReturn:
    """End a rank's process with `code`, whatever threads its process groups still have: teardown
    may abort on them."""
    if code in (ExitCode.OK, ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
        _run_interpreter_exit_handlers()
    for stream in (sys.stdout, sys.stderr):
        # Closed, or its reader is gone.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _run_interpreter_exit_handlers() -> None:
    """Do what the interpreter does when it ends, without its teardown, in which live process groups
    can crash.

    Not called after an error: the others learn of it sooner, and cleaning up could wait for them.
    """
    # Tells idle thread pools to end (compilers leave some), then joins all; multiprocessing's
    # children do the same.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
