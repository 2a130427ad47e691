"""The highest bit of the mantissa (bit 22) of one weight flips in the memory of one replica, which
then trains on."""

from __future__ import annotations

from phalanx.resilience.expectation import Expectation
from phalanx.resilience.fault import FaultSite
from phalanx.resilience.tensors import find_largest_parameter, flip_bit

EXPECTATION = Expectation(
    verdict="corrupt",
    detected_s=None,
    detected_steps=10,
    trained_again_s=None,
    is_named_by_majority=True,
    phases=("data",),
    settling_steps=10,
    overrides=("observe.invariants_every=5",),
)


def inject(site: FaultSite) -> None:
    """Flip the highest bit of the mantissa of one element of the largest parameter."""
    assert site.trainer is not None, "the fault flip_parameter strikes a rank that trains"
    flip_bit(find_largest_parameter(site.trainer.state.model.module).detach(), bit=22)
