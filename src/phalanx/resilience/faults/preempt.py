"""The scheduler takes the machine back: SIGTERM to the process that the user started."""

from __future__ import annotations

import signal

from phalanx.resilience.expectation import Ending, Expectation
from phalanx.resilience.fault import FaultSite
from phalanx.resilience.run_processes import find_supervisor

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


def inject(site: FaultSite) -> None:
    """SIGTERM to the supervisor of this run."""
    find_supervisor(site.run_dir).send_signal(signal.SIGTERM)
