"""User code waits for something that does not come: a lock, a socket, a file system."""

from __future__ import annotations

import time

from phalanx.resilience.expectation import HANG_DETECTION, HANG_RECOVERY_S, Expectation

EXPECTATION = Expectation(
    verdict="waiting elsewhere", detected_s=HANG_DETECTION, trained_again_s=HANG_RECOVERY_S
)
MAX_SLEEP_S = 3600.0


def inject() -> None:
    """Sleep for an hour, outside of any collective."""
    time.sleep(MAX_SLEEP_S)
