"""Python code turns in a loop that does not end: the process is busy, its threads run, and no
step comes."""

from __future__ import annotations

import time

from phalanx.resilience.expectation import HANG_DETECTION, HANG_RECOVERY_S, Expectation

EXPECTATION = Expectation(
    verdict="spinning", detected_s=HANG_DETECTION, trained_again_s=HANG_RECOVERY_S
)
MAX_SPIN_S = 3600.0


def inject() -> None:
    """Use one core for an hour, and do nothing."""
    until_s = time.monotonic() + MAX_SPIN_S
    while time.monotonic() < until_s:
        pass
