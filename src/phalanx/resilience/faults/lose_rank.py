"""A rank is gone and cannot be started again, as on a broken machine: the others go on without it,
until at a checkpoint it can be started."""

from __future__ import annotations

from phalanx.resilience.expectation import EACH_SAMPLE_ONCE, Expectation
from phalanx.resilience.faults.kill import inject

__all__ = ["EXPECTATION", "inject"]

EXPECTATION = Expectation(
    verdict="killed",
    # Three starts, one after the other.
    trained_again_s=20.0,
    # Fewer ranks add up the same numbers in another order.
    is_bit_equal=False,
    # Two failed starts: it does not come back. At the next checkpoint it would.
    also=tuple(f"kill:rank={{rank}},step=0,phase=startup,attempt={number}" for number in (1, 2)),
    overrides=("resilience.min_ranks=1", "observe.samples=true"),
    # For a checkpoint with fewer ranks, and steps with all of them.
    settling_steps=15,
    says="stopping after step \\d+: more ranks are started",
    samples=EACH_SAMPLE_ONCE,
    loss_difference=1e-4,
)
