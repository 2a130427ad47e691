"""The network between the ranks delays packets for some steps, by turns more and less: the run
waits, and nobody is to blame."""

from __future__ import annotations

from phalanx.resilience.expectation import NO_VERDICT, Expectation
from phalanx.resilience.fault import FaultSite
from phalanx.resilience.own_network import delay_packets_for_steps

EXPECTATION = Expectation(
    verdict=NO_VERDICT,
    detected_s=None,
    trained_again_s=None,
    may_lose_steps=False,
    names_rank=False,
    phases=("data",),
    stage="own_network_with_devices",
    # What ranks exchange through memory no network can hold up.
    overrides=("parallel.collectives=gloo",),
    settling_steps=12,
)
NUM_LATE_STEPS = 6
LEAST_DELAY_S, MOST_DELAY_S = 0.05, 0.2


def inject(site: FaultSite) -> None:
    """Deliver the packets of the run's own network 50 to 200 ms late, for six steps.

    Raises EnvironmentProblem in a network that the run shares with others, or without /dev/net/tun.
    """
    delay_packets_for_steps(site, NUM_LATE_STEPS, LEAST_DELAY_S, MOST_DELAY_S)
