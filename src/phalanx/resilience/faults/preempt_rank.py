"""One machine is taken back: SIGTERM to one rank, of which the others do not know."""

from __future__ import annotations

import os
import signal

from phalanx.resilience.expectation import PREEMPTION

EXPECTATION = PREEMPTION


def inject() -> None:
    """SIGTERM to this process."""
    os.kill(os.getpid(), signal.SIGTERM)
