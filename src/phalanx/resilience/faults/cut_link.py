"""The network of one rank is cut: its connections stand, and nothing comes through any more."""

from __future__ import annotations

from phalanx.resilience.expectation import HANG_DETECTION, HANG_RECOVERY_S, Expectation
from phalanx.resilience.own_network import drop_packets_of_connections

EXPECTATION = Expectation(
    verdict="link cut",
    detected_s=HANG_DETECTION,
    trained_again_s=HANG_RECOVERY_S,
    is_named_by_majority=True,
    stage="own_network",
    # What ranks exchange through memory no network can hold up.
    overrides=("parallel.collectives=gloo",),
)


def inject() -> None:
    """Throw away all packets of this process's connections, in both directions.

    Raises EnvironmentProblem in a network that the run shares with others.
    """
    drop_packets_of_connections(drops_received=True)
