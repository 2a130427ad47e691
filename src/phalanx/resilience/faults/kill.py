"""The process is gone between two instructions, as by the out-of-memory killer or a power cut of
one node."""

from __future__ import annotations

import os
import signal

from phalanx.resilience.expectation import Expectation

EXPECTATION = Expectation(verdict="killed")


def inject() -> None:
    """SIGKILL to this process."""
    # No handler, `finally` or atexit runs: nothing is flushed or closed.
    os.kill(os.getpid(), signal.SIGKILL)
