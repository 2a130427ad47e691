"""Run a function in N real ranks over gloo, forked from this process, which has imported torch
already."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_S = 300.0  # a hang is for ever; this is for slow machines
# For ranks to see the closed connection of one that failed, and to write their own reports.
PATIENCE_S = 0.3


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    deadline_s: float = DEADLINE_S,
    patience_s: float = PATIENCE_S,
) -> list[Any]:
    """`function(rank, *args)` in each of `num_ranks` ranks of one process group; their results in
    rank order.

    Raises AssertionError with the first rank's traceback if any rank fails, `patience_s` later at
    most; no rank outlives the call.
    """
    with tempfile.TemporaryDirectory() as directory:
        pids = [
            _fork(rank, num_ranks, Path(directory), function, args) for rank in range(num_ranks)
        ]
        try:
            _wait(pids, deadline_s, patience_s)
        finally:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                except (ProcessLookupError, ChildProcessError):
                    pass
        outcomes = [_read(Path(directory) / f"result-{rank}") for rank in range(num_ranks)]
    failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
    primary = [text for text in failures if "Connection closed by peer" not in text] or failures
    assert not failures, "\n".join(primary)
    return [value for _, value in outcomes]


def _fork(
    rank: int, num_ranks: int, directory: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    # a collection would write to, and so copy, all that this process shares with its parent
    gc.freeze()
    # A rank is gone in a moment: the few cycles that it makes may wait.
    gc.set_threshold(20_000)
    try:
        place = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
        os.environ.update(
            {name: str(value) for name, value in place.items()}, GLOO_SOCKET_IFNAME="lo"
        )
        torch.set_num_threads(1)
        if num_ranks > 1:
            store = dist.FileStore(str(directory / "store"), num_ranks)
            timeout = timedelta(seconds=60)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout
            )
            # a function may begin by destroying the group, and others may be connecting still
            dist.barrier()
        value = function(rank, *args)
        _write(directory / f"result-{rank}", (True, value))
        if num_ranks > 1:
            dist.barrier()
            dist.destroy_process_group()
        code = 0
    except BaseException:
        _write(directory / f"result-{rank}", (False, traceback.format_exc()))
    finally:
        os._exit(code)


def _wait(pids: list[int], deadline_s: float, patience_s: float) -> None:
    """Until all ranks ended, or one has failed and the others had their time, or the deadline."""
    left, until = set(pids), time.monotonic() + deadline_s
    while left and time.monotonic() < until:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.discard(pid)
                if status:
                    until = min(until, time.monotonic() + patience_s)
        time.sleep(0.005)


def _write(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(value))
    os.replace(partial, path)


def _read(path: Path) -> tuple[bool, Any]:
    if not path.exists():
        return False, "ended without a result (killed, or past the deadline)"
    value: tuple[bool, Any] = pickle.loads(path.read_bytes())
    return value
