"""User code raises at the same step in each attempt: starting again does not help."""

from __future__ import annotations

from phalanx.resilience.expectation import Ending, Expectation
from phalanx.resilience.faults.crash import inject

__all__ = ["EXPECTATION", "STRIKES_AGAIN", "inject"]

EXPECTATION = Expectation(
    verdict="exception",
    ending=Ending.STOPS,
    trained_again_s=None,
    exit_code=10,
    says=r"the batch of step \d+ is samples \d+ to \d+",
)
STRIKES_AGAIN = True
