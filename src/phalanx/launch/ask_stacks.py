"""Asks running ranks of this machine for the stack of their main thread, by a signal."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from phalanx.core.black_box_reader import BoxHeader
from phalanx.core.process_stat import has_signal_handler
from phalanx.launch.log_excerpts import read_main_thread_stack
from phalanx.launch.paths import rank_log_path
from phalanx.launch.rank import STACKS_SIGNAL
from phalanx.observe.rank_waits import RankState

_ANSWER_TIMEOUT_S = 1.0
_POLL_INTERVAL_S = 0.05


def ask_for_stacks(run_dir: Path, states: Mapping[int, RankState]) -> dict[int, list[str]]:
    """The stack of each rank that answers, by rank; empty for one that was asked and did not.

    Ranks that are stopped, gone, elsewhere or do not handle the signal are not asked: it would end
    a process that does not expect it.
    """
    sizes: dict[int, int] = {}
    logs: dict[int, Path] = {}
    for rank, state in states.items():
        header = state.position and state.position.header
        if not header or state.process.is_halted or state.process.state == "unknown":
            continue
        if not _handles_stacks_signal(header):
            continue
        logs[rank] = rank_log_path(run_dir, rank, header.incarnation)
        sizes[rank] = _read_size(logs[rank])
        os.kill(header.pid, STACKS_SIGNAL)
    deadline = time.monotonic() + _ANSWER_TIMEOUT_S
    sizes_before: dict[int, int] = {}
    while time.monotonic() < deadline:
        sizes_now = {rank: _read_size(path) for rank, path in logs.items()}
        has_answered = all(sizes_now[rank] > size for rank, size in sizes.items())
        # A stack is written frame by frame: until nothing is added, it may not be all.
        if has_answered and sizes_now == sizes_before:
            break
        sizes_before = sizes_now
        time.sleep(_POLL_INTERVAL_S)
    stacks: dict[int, list[str]] = {}
    for rank, path in logs.items():
        stacks[rank] = []
        # An older stack in the log is no answer.
        if _read_size(path) > sizes[rank]:
            stacks[rank] = read_main_thread_stack(path)
    return stacks


def _handles_stacks_signal(header: BoxHeader) -> bool:
    return has_signal_handler(header.pid, STACKS_SIGNAL)


def _read_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
