"""A quota of processor time throttles all ranks alike, as of a container that is too small: nobody
is to blame, and nothing is hung."""

from __future__ import annotations

from phalanx.resilience.cpu_quota import throttle_for_seconds
from phalanx.resilience.expectation import NO_VERDICT, Expectation
from phalanx.resilience.faults.cpu_quota import DURATION_S
from phalanx.resilience.run_processes import find_server

EXPECTATION = Expectation(
    verdict=NO_VERDICT,
    detected_s=None,
    trained_again_s=None,
    may_lose_steps=False,
    names_rank=False,
    stage="cpu_quota",
    settling_steps=20,
    lasts_s=DURATION_S,
)


def inject() -> None:
    """Give all ranks together a twentieth of a core, for 10 s."""
    throttle_for_seconds([each.pid for each in find_server().children()], DURATION_S)
