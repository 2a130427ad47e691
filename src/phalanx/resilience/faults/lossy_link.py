"""The network between the ranks loses one packet in twenty for some steps: TCP repeats them, and
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

EXPECTATION = replace(BORNE_BY_NETWORK, settling_steps=18)
NUM_LOSSY_STEPS = 12
LOST_SHARE = 0.05
# A filter of packets in the classic machine code: load a random number, and drop what has a large
# one. The kernel's words are TC_ACT_OK (0) and TC_ACT_SHOT (2).
_RANDOM_NUMBER_AT = 0xFFFFF038
_LEAST_DROPPED = int((1 - LOST_SHARE) * (1 << 32))
FILTER = f"4,32 0 0 {_RANDOM_NUMBER_AT},53 1 0 {_LEAST_DROPPED},6 0 0 0,6 0 0 2"


def inject(site: FaultSite) -> None:
    """Lose 5 % of the packets on the loopback device of the run's own network, for twelve steps.

    Raises EnvironmentProblem in a network that the run shares with others.
    """
    require_own_network()
    run_tc("qdisc", "add", "dev", "lo", "clsact")
    # As they come in: of what it does not get rid of itself a sender knows.
    run_tc("filter", "add", "dev", "lo", "ingress", "bpf", "da", "bytecode", FILTER)
    delete_qdisc_after_steps(site, NUM_LOSSY_STEPS, "clsact")
