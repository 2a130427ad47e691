"""A quota of processor time throttles one rank, as of a container that is too small: slow, and not
hung."""

from __future__ import annotations

import os

from phalanx.resilience.cpu_quota import throttle_for_seconds
from phalanx.resilience.expectation import Expectation

DURATION_S = 10.0
EXPECTATION = Expectation(
    verdict="slow",
    detected_s=None,
    detected_steps=20,
    trained_again_s=None,
    may_lose_steps=False,
    stage="cpu_quota",
    settling_steps=20,
    lasts_s=DURATION_S,
)


def inject() -> None:
    """Give this process a twentieth of a core, for 10 s."""
    throttle_for_seconds([os.getpid()], DURATION_S)
