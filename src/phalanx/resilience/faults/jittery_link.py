"""The network between the ranks delays packets for some steps, by turns more and less: the run
waits, and nobody is to blame."""

from __future__ import annotations

from dataclasses import replace

from phalanx.resilience.expectation import BORNE_BY_NETWORK
from phalanx.resilience.fault import FaultSite
from phalanx.resilience.own_network import delay_packets_for_steps

EXPECTATION = replace(BORNE_BY_NETWORK, stage="own_network_with_devices", settling_steps=12)
NUM_LATE_STEPS = 6
LEAST_DELAY_S, MOST_DELAY_S = 0.05, 0.2


def inject(site: FaultSite) -> None:
    """Deliver the packets of the run's own network 50 to 200 ms late, for six steps.

    Raises EnvironmentProblem in a network that the run shares with others, or without /dev/net/tun.
    """
    delay_packets_for_steps(site, NUM_LATE_STEPS, LEAST_DELAY_S, MOST_DELAY_S)
