"""What a forked rank does: move into its own log, environment and lifelines, call the entry, leave a report."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from phalanx.core.errors import ExitCode
from phalanx.core.registry import resolve
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
        redirect_output(rank_log(task.run_dir, task.ranks.rank, task.ranks.attempt))
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


def redirect_output(path: Path) -> None:
    """Point standard output and error, Python's and C's, at the end of `path`; standard input at nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    sys.stdout = _line_buffered(1)
    sys.stderr = _line_buffered(2)


def _line_buffered(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _report(task: RankTask, error: BaseException) -> int:
    report = describe(error)
    print(report.traceback, file=sys.stderr, end="")
    try:
        report.save(error_report(task.run_dir, task.ranks.rank, task.ranks.attempt))
    except OSError:  # a full disk; the exit code still says that it failed
        traceback.print_exc()
    return report.exit_code


def _finish() -> None:
    """What the interpreter does when it ends, without its teardown, in which live process groups can crash.

    Not done after an error: the others learn of it sooner, and cleaning up could wait for them.
    """
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
