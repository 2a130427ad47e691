"""C code sleeps and does not give up Python's lock: no other thread of the process runs."""

from __future__ import annotations

import ctypes

from phalanx.resilience.expectation import HANG_DETECTION, HANG_RECOVERY_S, Expectation

EXPECTATION = Expectation(
    verdict="gil held", detected_s=HANG_DETECTION, trained_again_s=HANG_RECOVERY_S
)
MAX_SLEEP_S = 3600


def inject() -> None:
    """Sleep for an hour with the interpreter's lock held."""
    # PyDLL, unlike CDLL, keeps the lock during the call.
    ctypes.PyDLL(None).sleep(MAX_SLEEP_S)
