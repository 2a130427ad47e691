"""What a forked rank does: move into its own log, environment and lifelines, call the entry, leave a report."""

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
from typing import Any, NoReturn

from phalanx.core.errors import ExitCode
from phalanx.core.logs import redirect_output
from phalanx.core.registry import resolve
from phalanx.core.secrets import Redactor
from phalanx.launch.paths import error_report, rank_log
from phalanx.launch.rank_env import RankEnv, rank_variables
from phalanx.launch.reports import describe


@dataclass(frozen=True)
class RankTask:
    """All that one rank needs to know."""

    entry: str
    payload: dict[str, Any]
    run_dir: Path
    ranks: RankEnv
    master_port: int


def run_rank(task: RankTask) -> int:
    """The exit code of the entry, or that of its error, of which a report then lies in RUN/logs."""
    try:
        _close_input()
        redirect_output(rank_log(task.run_dir, task.ranks.rank, task.ranks.attempt), Redactor(os.environ))
        faulthandler.enable(2)
        os.environ.update(rank_variables(task.ranks, task.master_port, os.environ))
        code = resolve(task.entry, "phalanx", "")(task.payload)
        _finish()
        return int(code or 0) & 0xFF
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            _finish()
            return (stop.code or 0) & 0xFF
        return _report(task, stop)
    except KeyboardInterrupt:  # nobody caught it: die of it, as any program does
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return ExitCode.INTERRUPTED
    except BaseException as error:  # torch raises some errors that are no Exception
        return _report(task, error)


def _close_input() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _report(task: RankTask, error: BaseException) -> int:
    report = describe(error)
    print(report.traceback, file=sys.stderr, end="")
    try:
        report.save(error_report(task.run_dir, task.ranks.rank, task.ranks.attempt))
    except OSError:  # a full disk; the exit code still says that it failed
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
