"""The network between the ranks is slow for some steps, and never cut: the run waits for it, and
nobody is to blame."""

from __future__ import annotations

from dataclasses import replace

from phalanx.resilience.expectation import BORNE_BY_NETWORK
from phalanx.resilience.fault import FaultSite
from phalanx.resilience.own_network import (
    delete_qdisc_after_steps,
    require_own_network,
    run_tc,
)

EXPECTATION = replace(BORNE_BY_NETWORK, settling_steps=12)
NUM_SLOW_STEPS = 6
# The gradients of the small job take a good part of a second.
RATE, BURST, LATENCY = "30mbit", "128kb", "400ms"


def inject(site: FaultSite) -> None:
    """Shape the loopback device of the run's own network to 30 Mbit/s, for six steps.

    Raises EnvironmentProblem in a network that the run shares with others.
    """
    require_own_network()
    run_tc(
        *("qdisc", "add", "dev", "lo", "root", "tbf"),
        *("rate", RATE, "burst", BURST, "latency", LATENCY),
    )
    delete_qdisc_after_steps(site, NUM_SLOW_STEPS, "root")
