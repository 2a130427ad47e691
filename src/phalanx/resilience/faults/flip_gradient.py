"""The highest bit of the exponent (bit 30) of one gradient flips on one rank before gradients are
reduced: silent corruption by a processor."""

from __future__ import annotations

from typing import Any

from phalanx.resilience.expectation import Expectation
from phalanx.resilience.fault import FaultSite
from phalanx.resilience.tensors import find_largest_parameter, flip_bit

EXPECTATION = Expectation(
    verdict="corrupt",
    detected_s=None,
    detected_steps=10,
    trained_again_s=None,
    may_lose_steps=False,
    # After the reduction the gradients of all ranks are not finite.
    names_rank=False,
    phases=("forward",),
    settling_steps=10,
)


def inject(site: FaultSite) -> None:
    """Flip the highest bit of the exponent in one element of the next gradient of the largest
    parameter."""
    assert site.trainer is not None, "the fault flip_gradient strikes a rank that trains"
    parameter = find_largest_parameter(site.trainer.state.model.module)

    def flip(gradient: Any) -> Any:
        handle.remove()
        flipped = gradient.detach().clone()
        flip_bit(flipped, bit=30)
        return flipped

    handle = parameter.register_hook(flip)
