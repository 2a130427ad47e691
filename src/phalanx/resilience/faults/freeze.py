"""The process stands still, as under a debugger, a frozen cgroup or a stalled virtual machine."""

from __future__ import annotations

import os
import signal

from phalanx.resilience.expectation import HANG_DETECTION, HANG_RECOVERY_S, Expectation

EXPECTATION = Expectation(
    verdict="frozen", detected_s=HANG_DETECTION, trained_again_s=HANG_RECOVERY_S
)


def inject() -> None:
    """SIGSTOP to this process: all its threads stop, and nobody wakes them."""
    os.kill(os.getpid(), signal.SIGSTOP)
