"""What can be asked of compressed gradients: nothing equals the reference, yet nothing may be lost.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.plan.workload import has_error_feedback

TOLERANCE_OF_CAST = {"fp16": 5e-3, "bf16": 4e-2}
"""Rounding is 5e-4 and 4e-3 of each rank's gradient; their sum is smaller where they cancel, and is
rounded, too."""


@dataclass(frozen=True)
class PlainCompression:
    """`judged`: what a plain implementation of a compression judges of it, in words; `fault`: the
    likely cause where that differs."""

    judged: str
    fault: str


_SCALED = "multiplied by the power of two that brings the largest element of all ranks near 2^15"
JUDGED_BY_PLAIN: Mapping[str, PlainCompression] = {
    "bf16": PlainCompression(
        "that each element is rounded once to bf16 by each rank, and once in each sum of two",
        "bf16 does not send each rank's gradient rounded once: digits are lost on the way",
    ),
    "fp16": PlainCompression(
        "that each element is rounded once to fp16 by each rank, and once in each sum of two,"
        f" {_SCALED}",
        f"fp16 does not send each rank's gradient rounded once, {_SCALED}: another scale, or"
        " digits are lost on the way",
    ),
    "topk": PlainCompression(
        "that the largest elements are sent",
        "topk does not send the largest elements, or another number of them",
    ),
    "int8": PlainCompression(
        "that no more is kept than rounding to 255 levels leaves",
        "int8 keeps more than rounding to 255 levels leaves: another scale, or other levels",
    ),
    "powersgd": PlainCompression(
        "that each step sends what power iteration makes of the step before, in as many columns as"
        " compress_rank says",
        "powersgd does not send the mean projected by one step of power iteration from the step"
        " before: its matrix is not kept between steps, not made orthogonal, or another one",
    ),
}
"""Compressions of which a plain implementation says what should be sent."""


def is_lossy_compression(compress: str) -> bool:
    """True where most of a gradient may stay behind; casts only round."""
    return has_error_feedback(compress)


def choose_compression_tolerance(compress: str, exact: float) -> float:
    """The tolerance of a layout with this compression; `exact` is that of uncompressed ones."""
    return max(exact, TOLERANCE_OF_CAST.get(compress, 0.0))


def describe_compression_tolerance(compress: str, tolerance: float) -> str:
    if is_lossy_compression(compress):
        return (
            f"{compress} compression changes gradients by design: judged is that in every step what"
            " is sent and what is newly kept add up to the reference's gradient, and that ranks"
            " stay equal"
        )
    return f"{compress} compression rounds gradients: they are judged at {tolerance:.0e}"
