"""What a forked rank does: move into its own log, environment and lifelines, call the entry, say how it ended."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from phalanx.core.errors import ExitCode, RunTakenError, StoreTakenError
from phalanx.core.logs import redirect_output
from phalanx.core.registry import resolve
from phalanx.core.secrets import Redactor
from phalanx.core.typed_json import JsonObject
from phalanx.launch.end_record import EndRecord, EndWriter
from phalanx.launch.paths import error_report, rank_log
from phalanx.launch.rank_env import RankEnv, rank_variables
from phalanx.launch.reports import describe


@dataclass(frozen=True)
class RankTask:
    """All that one rank needs to know. `doing`: what it is for, as messages say it."""

    entry: str
    payload: JsonObject
    run_dir: Path
    ranks: RankEnv
    master_port: int
    doing: str = "training"


REPORT_ERROR, TELL_DONE, PASS_ON = "report_error", "tell_done", "pass_on_event"
# Has a rank write its main thread's stack to its log, also while C code holds the interpreter's lock. Schedulers send
# SIGUSR1 and SIGUSR2; this one is left alone.
STACKS_SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
STACK_HEAD = "Stack (most recent call first):"  # how faulthandler begins


def run_rank(task: RankTask, end: EndWriter) -> int:
    """Call the entry and say on `end` how it ended. Returns the exit code of the process, which nobody believes.

    The entry's payload holds, as `report_error`, a function of an exception: an entry whose way out may block, because
    other ranks or threads take part in it, reports its error before it cleans up. `tell_done` says that its work is
    done, before what may still go wrong and spoils nothing. `pass_on_event` is a function of an event's line, which
    shows the supervisor what the disk did not take.
    """

    def report_error(error: BaseException) -> int:
        return _report(task, error, end)

    def tell_done() -> None:
        end.tell(EndRecord(int(ExitCode.OK)))

    try:
        _close_input()
        redirect_output(rank_log(task.run_dir, task.ranks.rank, task.ranks.attempt), Redactor(os.environ))
        faulthandler.enable(2)
        faulthandler.register(STACKS_SIGNAL, file=2, all_threads=False)
        os.environ.update(rank_variables(task.ranks, task.master_port, os.environ))
        trace = task.run_dir / "logs" / f"nccl-attempt-{task.ranks.attempt:02d}-rank-"
        os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(trace))  # torch appends the rank
        more = {REPORT_ERROR: report_error, TELL_DONE: tell_done, PASS_ON: end.pass_on}
        code = int(resolve(task.entry, "phalanx", "")({**task.payload, **more}) or 0) & 0xFF
        end.tell(EndRecord(code))
        _finish()
        return code
    except KeyboardInterrupt as interrupt:
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return report_error(interrupt)  # no signal made it: user code raised it
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nobody caught it: die of it, as any program does
        os.kill(os.getpid(), signal.SIGINT)
        return ExitCode.INTERRUPTED
    except BaseException as error:  # torch raises some errors that are no Exception; sys.exit is no way to finish
        return report_error(error)


def _close_input() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _report(task: RankTask, error: BaseException, end: EndWriter) -> int:
    """Say why this rank failed: to the supervisor first, then in its log and in a file."""
    report = describe(error, task.run_dir, task.doing)
    if not end.is_rank or (end.told is not None and end.told.report is not None):
        return report.exit_code
    end.tell(EndRecord(report.exit_code, report))
    if isinstance(error, RunTakenError) and not isinstance(error, StoreTakenError):
        return report.exit_code  # the folder of its log and report is another job's
    print(report.traceback, file=sys.stderr, end="")
    try:
        report.save(error_report(task.run_dir, task.ranks.rank, task.ranks.attempt))
    except OSError:  # a full disk; the supervisor has the report
        traceback.print_exc()
    return report.exit_code


def leave(code: int) -> NoReturn:
    """End a rank's process with `code`, whatever threads its process groups still have: teardown may abort on them."""
    if code in (ExitCode.OK, ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
        _finish()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it any more
            stream.flush()
    os._exit(code)


def _finish() -> None:
    """What the interpreter does when it ends, without its teardown, in which live process groups can crash.

    Not done after an error: the others learn of it sooner, and cleaning up could wait for them.
    """
    # Tells idle thread pools to end (compilers leave some), then joins all; multiprocessing's children do the same.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
