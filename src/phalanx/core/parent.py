"""A process that ends with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def kill_this_process_with_parent() -> None:
    """Be killed as soon as the thread that started this process is gone, also while stopped or
    inside C code; on Linux alone."""
    parent = os.getppid()
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It was gone before we asked.
    if os.getppid() != parent:
        os._exit(1)
