"""The rank that was started again is gone, too, before it trains: a fault meets the recovery."""

from __future__ import annotations

from phalanx.resilience.expectation import Expectation
from phalanx.resilience.faults.kill import inject

__all__ = ["EXPECTATION", "inject"]

EXPECTATION = Expectation(
    verdict="killed",
    # Two recoveries, one after the other.
    trained_again_s=10.0,
    also=("kill:rank={rank},step=0,phase=startup,attempt=1",),
)
