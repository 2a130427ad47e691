"""The scheduler takes the machine back: SIGTERM to the process that the user started."""

from __future__ import annotations

import signal

from phalanx.resilience.expectation import PREEMPTION
from phalanx.resilience.fault import FaultSite
from phalanx.resilience.run_processes import find_supervisor

EXPECTATION = PREEMPTION


def inject(site: FaultSite) -> None:
    """SIGTERM to the supervisor of this run."""
    find_supervisor(site.run_dir).send_signal(signal.SIGTERM)
