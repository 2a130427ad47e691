"""The parts of a rank's log that say why its process ended."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.core.files import open_regular_file
from phalanx.launch.rank import STACK_FIRST_LINE

if TYPE_CHECKING:
    # At run time in a circle: an attempt's hang is told with excerpts.
    from phalanx.launch.attempt_end import RankExit

# Lines that say why a rank was aborted: the lines after them are often longer than the end of a log
# that is shown.
_ABORT_REASON_LINE_PATTERN = re.compile(
    r"watchdog|NCCL (WARN|error)|terminate called|what\(\):|Fatal Python error", re.IGNORECASE
)
NUM_LAST_LINES, NUM_TELLING_LINES = 25, 6
# Whoever calls the rank's own work, the same in all ranks: what started the process, and what waits
# in it for the next attempt.
_STARTUP_FRAME = re.compile(r'/phalanx/(launch/rank|run/rank)\.py"')
_MAX_TAIL_BYTES = 64 << 20  # of a log, from its end: user code may have printed any number of lines


def read_log_end_explaining_death(rank_exit: RankExit | None, log: Path) -> list[str]:
    """The end of the log where it explains a death (stacks of faulthandler, an abort's message),
    and before it those lines of NCCL and of C++ that say why."""
    # The end of a log does not explain a signal that came from outside.
    silent_signals = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    if rank_exit is not None and rank_exit.signal in silent_signals:
        return []
    last_lines = _read_last_log_lines(log)[-NUM_LAST_LINES:]
    return [line for line in read_abort_reason(log) if line not in last_lines] + last_lines


def read_abort_reason(log: Path) -> list[str]:
    """The first lines of a log that say why a process was aborted."""
    return list(filter(_ABORT_REASON_LINE_PATTERN.search, _read_last_log_lines(log)))[
        :NUM_TELLING_LINES
    ]


def is_aborted_by_mismatch(log: Path) -> bool:
    """True if gloo aborted a process because what it received is not of the collective it is
    in."""
    return any("preamble.length" in line for line in read_abort_reason(log))


def read_main_thread_stack(log: Path) -> list[str]:
    """The stack of a rank's main thread when it was asked, the innermost frame first and without
    those that only started the rank; empty if it could not answer."""
    lines = _read_last_log_lines(log)
    if STACK_FIRST_LINE not in lines:
        return []
    start = len(lines) - lines[::-1].index(STACK_FIRST_LINE)
    frames: list[str] = []
    for line in lines[start:]:
        is_frame = line.startswith("  File")
        # In start-up itself one of these is where the rank is.
        if not is_frame or (frames and _STARTUP_FRAME.search(line)):
            break
        frames.append(line)
    return [STACK_FIRST_LINE, *frames] if frames else []


def _read_last_log_lines(log: Path) -> list[str]:
    try:
        return _read_log_tail(log).splitlines()
    except OSError:
        return []


def _read_log_tail(log: Path) -> str:
    with open_regular_file(log) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_TAIL_BYTES))
        return file.read(_MAX_TAIL_BYTES).decode("utf-8", "replace")
