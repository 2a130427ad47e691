"""Two ranks are gone at the same place: one node with both, or a switch."""

from __future__ import annotations

from phalanx.resilience.expectation import Expectation
from phalanx.resilience.faults.kill import inject

__all__ = ["EXPECTATION", "inject"]

EXPECTATION = Expectation(
    verdict="killed",
    # Either of the two is a right answer.
    names_rank=False,
    also=("kill:rank={other},step={step},phase={phase}",),
)
