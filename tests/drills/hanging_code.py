"""Faults of user code that keep a rank alive and from going on, each by its name."""

from __future__ import annotations

import ctypes
import os
import signal
import time

FAR_S = 600


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
