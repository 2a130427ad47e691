"""A guard process above each rank of another launcher, which believes exit codes: the guard turns
the rank's end record into one.

`os._exit(0)` in user code would otherwise be a success to torchrun or srun. The guard is forked
before torch is imported, hands on the signals that it gets, and when it is killed the kernel kills
the rank.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

from phalanx.core.black_box_reader import read_last_position
from phalanx.core.errors import ExitCode
from phalanx.core.stop_signals import STOP_SIGNALS
from phalanx.launch.end_record import EndReader, EndRecord, EndWriter, open_end_pipe
from phalanx.launch.lifeline import die_when_pipes_close
from phalanx.launch.paths import black_box_path
from phalanx.launch.positions import describe_rank_position
from phalanx.launch.signals import format_signal_name

_FORWARDED_SIGNALS = {*STOP_SIGNALS, signal.SIGUSR2}
# SI_KERNEL: the terminal's Ctrl-C, which goes to the whole group and reaches the rank by itself.
_SI_KERNEL = 0x80


def fork_under_guard(rank: int, run_dir: Path) -> EndWriter:
    """Go on as a child process, the rank, which writes its end record to the returned EndWriter.

    The caller's process becomes the guard: it ends when the rank does, with a code that is no
    success unless the rank said that its work is done.
    """
    reader, write_end = open_end_pipe()
    life_read, life_write = os.pipe()
    watched = {*_FORWARDED_SIGNALS, signal.SIGCHLD}
    # Were it ignored, the kernel would reap the rank and its status with it.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Blocked before the fork, so that none is lost between fork and wait.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    sys.stdout.flush()
    sys.stderr.flush()
    # Buffers are empty by now: what is in them would be written by both.
    pid = os.fork()
    if pid == 0:
        reader.close()
        os.close(life_write)
        # Not the group: the launcher made it, and may have others in it.
        die_when_pipes_close([life_read], whole_group=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return EndWriter(write_end)
    # The rank alone holds it: its end of the pipe closes when it dies.
    os.close(write_end)
    os.close(life_read)
    os._exit(_forward_signals_until_rank_ends(pid, rank, run_dir, reader, watched))


def _forward_signals_until_rank_ends(
    pid: int, rank: int, run_dir: Path, reader: EndReader, watched: set[signal.Signals]
) -> int:
    record: EndRecord | None = None
    while True:
        received = signal.sigwaitinfo(watched)
        if received.si_signo != signal.SIGCHLD:
            if received.si_code != _SI_KERNEL:
                os.kill(pid, received.si_signo)
            continue
        ended, status = os.waitpid(pid, os.WNOHANG)
        # SIGCHLD also comes when the rank was only stopped, or continued.
        if not ended:
            continue
        # Once the rank has ended: what it wrote is complete, and stays in the pipe until then.
        record = reader.read_complete_record() or record
        return _choose_guard_exit_code(rank, run_dir, os.waitstatus_to_exitcode(status), record)


def _choose_guard_exit_code(rank: int, run_dir: Path, code: int, record: EndRecord | None) -> int:
    """The exit code that the launcher is to believe; prints the reason if the rank could not."""
    if record is not None:
        return record.code
    box = black_box_path(run_dir, rank)
    where = ""
    if box.exists():
        where = f" {describe_rank_position(read_last_position(box))}"
    if code < 0:
        _print_line_to_stderr(f"rank {rank} was killed by {format_signal_name(-code)}{where}")
        # By the same signal, so that the launcher sees it, too.
        _die_by_signal(-code)
    how = "by os._exit or C's exit, before the run was done"
    _print_line_to_stderr(f"rank {rank} exited with code {code}{where} ({how})")
    return int(ExitCode.INTERNAL)


def _print_line_to_stderr(line: str) -> None:
    # Flushed, for the guard leaves by os._exit.
    print(f"phalanx: {line}", file=sys.stderr, flush=True)


def _die_by_signal(number: int) -> None:
    # SIGKILL has no handler to put back, and cannot be blocked.
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    # The rank has left a core, if one is wanted.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), number)
