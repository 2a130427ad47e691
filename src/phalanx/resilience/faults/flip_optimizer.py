"""The lowest bit of the exponent (bit 23) of one number of the optimizer's memory flips on one rank
between two steps."""

from __future__ import annotations

from phalanx.resilience.expectation import Expectation
from phalanx.resilience.fault import FaultSite
from phalanx.resilience.tensors import find_largest_optimizer_tensor, flip_bit

EXPECTATION = Expectation(
    verdict="corrupt",
    detected_s=None,
    detected_steps=10,
    trained_again_s=None,
    phases=("data",),
    settling_steps=10,
    overrides=("resilience.check_memory_every=1",),
)


def inject(site: FaultSite) -> None:
    """Flip the lowest bit of the exponent of one element of the optimizer's largest tensor."""
    assert site.trainer is not None, "the fault flip_optimizer strikes a rank that trains"
    flip_bit(find_largest_optimizer_tensor(site.trainer.state.optimizer), bit=23)
