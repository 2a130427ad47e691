"""One machine is taken back: SIGTERM to one rank, of which the others do not know."""

from __future__ import annotations

import os
import signal

from phalanx.resilience.expectation import Ending, Expectation

EXPECTATION = Expectation(
    verdict="preempted",
    ending=Ending.RESUMES,
    detected_s=None,
    trained_again_s=None,
    may_lose_steps=False,
    names_rank=False,
    exit_code=75,
    # A run may finish before it hears of the signal.
    settling_steps=20,
)


def inject() -> None:
    """SIGTERM to this process."""
    os.kill(os.getpid(), signal.SIGTERM)
