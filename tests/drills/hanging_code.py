"""Faults of user code that keep a rank alive and from going on, each by its name."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from phalanx.nn.objective import causal_cross_entropy

FAR_S = 600
_num_calls = 0


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


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
