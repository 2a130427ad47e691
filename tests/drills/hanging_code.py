"""Faults of user code that keep a rank alive and from going on, each by its name."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from phalanx.nn.objective import causal_cross_entropy
from phalanx.resilience.fault import FaultSite

FAR_S = 600
# Of the objective that slows down: on a rank that does little besides, 1.3 times as long.
USUAL_S, LONGER_S, SLOW_FROM_STEP = 0.03, 0.075, 50
_num_calls = 0


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def freeze_when_done(site: FaultSite) -> None:
    """Freeze once all ranks have said that their work is done, before they part."""
    _do_when_done(site, freeze)


def spin_when_done(site: FaultSite) -> None:
    _do_when_done(site, spin)


def sleep_when_done(site: FaultSite) -> None:
    _do_when_done(site, sleep)


def _do_when_done(site: FaultSite, action: Callable[[], None]) -> None:
    trainer: Any = site.trainer
    trainer.record_ending = action


def shut_connections() -> None:
    """End the connections of this process to others, as a switch that starts anew does: no process
    ends."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=os.dup(int(name)))
            # Of one that listens gloo would abort.
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername():
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def close_sockets() -> None:
    """Close all sockets of this process, as code does that closes what is not its own."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.close(int(name))


def hold_lock_asleep() -> None:
    """Sleep in C without giving Python's lock away."""
    # A signal ends a sleep early.
    while True:
        ctypes.PyDLL(None).sleep(FAR_S)


def hold_lock_busy() -> None:
    """Compute in C without giving Python's lock away."""
    pow(3, 10**9)


def spin() -> None:
    while True:
        pass


def sleep() -> None:
    time.sleep(FAR_S)


def enter_another_collective() -> None:
    """A collective that no other rank enters: a barrier, which gloo does not take for another."""
    dist.barrier()


def enter_another_reduction() -> None:
    """A collective that no other rank enters, and that gloo takes for the others' next one."""
    dist.all_reduce(torch.zeros(1))


def write_phases_for_ever(site: FaultSite) -> None:
    """Go on within the step, from phase to phase."""
    assert site.trainer is not None
    while True:
        with site.trainer.state.model.phases("record"):
            time.sleep(0.01)


def leave_with_code_0() -> None:
    os._exit(0)


def cross_entropy_behind_barrier(
    outputs: Any, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """An objective with a collective of its own, which rank 1 of the first attempt leaves out at
    its 15th call."""
    global _num_calls
    _num_calls += 1
    is_skipped = _num_calls == 15 and os.environ["RANK"] == "1"
    if not is_skipped or os.environ["PHALANX_ATTEMPT"] != "0":
        dist.barrier()
    return causal_cross_entropy(64)(outputs, batch)


def cross_entropy_that_slows_down(
    outputs: Any, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """An objective that computes for a while on all ranks, and from a step on longer on rank 1."""
    global _num_calls
    _num_calls += 1
    is_slow = os.environ["RANK"] == "1" and _num_calls >= SLOW_FROM_STEP
    # Processor seconds: also on a busy machine it is this rank that needs more of them.
    until_s = time.thread_time() + (LONGER_S if is_slow else USUAL_S)
    while time.thread_time() < until_s:
        pass
    return causal_cross_entropy(64)(outputs, batch)


_STOP_BY_TURNS = """
import os, signal, sys, time
pid, until_s, stopped_s, running_s = int(sys.argv[1]), *map(float, sys.argv[2:])
try:
    while os.getppid() == pid and time.monotonic() < until_s:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(stopped_s)
        os.kill(pid, signal.SIGCONT)
        time.sleep(running_s)
except ProcessLookupError:
    pass
"""


def run_half_of_the_time() -> None:
    """For 5 s this process is stopped and continued by turns, each 50 ms."""
    _start_stopping(5.0, 0.05, 0.05)


def run_a_tenth_of_the_time() -> None:
    """For 8 s this process is stopped for 900 ms and runs for 100 ms."""
    _start_stopping(8.0, 0.9, 0.1)


def _start_stopping(seconds: float, stopped_s: float, running_s: float) -> None:
    until_s = time.monotonic() + seconds
    words = map(str, (os.getpid(), until_s, stopped_s, running_s))
    quiet = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
    }
    subprocess.Popen([sys.executable, "-S", "-c", _STOP_BY_TURNS, *words], **quiet)
