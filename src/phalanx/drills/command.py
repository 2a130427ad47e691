"""One `phalanx train` of a drill: a process of its own, with an end that is waited for, and what it
leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from phalanx.core.files import open_regular_file, open_regular_file_for_append
from phalanx.core.launchers import SUPERVISED_VARIABLE
from phalanx.core.slurm import REQUEUE_COUNT_VARIABLE
from phalanx.drills.load import LoadMeter

PHALANX_COMMAND = (sys.executable, "-m", "phalanx")
_POLL_S = 0.02
_DEPARTURE_LIMIT_S = 15.0
# Variables: a trial is no rank of ours, and begins anew where the drill's own job was requeued.
_NOT_OF_A_TRIAL = (SUPERVISED_VARIABLE, REQUEUE_COUNT_VARIABLE)


@dataclass(frozen=True)
class CommandEnd:
    """The end of a command. `code`: its exit code, -N for signal N; `is_overdue`: it was killed, as
    it took longer than its limit.

    `ended_s` (monotonic) is when the command was gone, `departed_s` when the last process of its
    run was; `num_left` of them had to be killed. `load`: threads of the machine that ran or wanted
    to meanwhile, in the mean (None: not known).
    """

    code: int
    wall_s: float
    is_overdue: bool
    ended_s: float
    departed_s: float
    num_left: int
    load: float | None = None


def run_phalanx(
    arguments: Sequence[str],
    run_dir: Path,
    *,
    log: Path,
    limit_s: float,
    command: Sequence[str] = PHALANX_COMMAND,
    on_wait: Callable[[], None] = lambda: None,
) -> CommandEnd:
    """Run `phalanx ARGUMENTS` of a run to its end, which writes what it says to `log`.

    `on_wait` is called many times a second while it runs.

    Ended by Ctrl-C or an error here, it is stopped with all that it started.
    """
    began_s = time.monotonic()
    with open_regular_file_for_append(log) as output:
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={name: value for name, value in os.environ.items() if name not in _NOT_OF_A_TRIAL},
            # Ctrl-C is ours: a fault may be a signal, and the run must not get another one.
            start_new_session=True,
        )

    load = LoadMeter()

    def has_ended() -> bool:
        on_wait()
        load.sample()
        return process.poll() is not None

    try:
        is_overdue = not _wait_until(has_ended, limit_s)
    except BaseException:
        _kill_processes([process.pid, *find_run_processes(run_dir)])
        process.wait()
        raise
    if is_overdue:
        process.kill()
    code = process.wait()
    ended_s = time.monotonic()
    _wait_until(lambda: not find_run_processes(run_dir), _DEPARTURE_LIMIT_S)
    departed_s = time.monotonic()
    leftover_pids = find_run_processes(run_dir)
    _kill_processes(leftover_pids)
    return CommandEnd(
        code, ended_s - began_s, is_overdue, ended_s, departed_s, len(leftover_pids), load.mean
    )


def _wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    until_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(_POLL_S)
    return True


def find_run_processes(run_dir: Path) -> list[int]:
    """Processes that have a file of a run open or mapped: its ranks, its server, its observers."""
    run_prefix, own_pid = f"{run_dir.resolve()}{os.sep}", os.getpid()
    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == own_pid or process.status() == psutil.STATUS_ZOMBIE:
                continue
            opened = [file.path for file in process.open_files()]
            with open_regular_file(f"/proc/{process.pid}/maps") as maps:
                mapped = maps.read().decode(errors="replace")
            if run_prefix in mapped or any(path.startswith(run_prefix) for path in opened):
                pids.append(process.pid)
    return pids


def _kill_processes(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
