"""What can be asked of compressed gradients: nothing equals the reference, yet nothing may be lost.

Torch-free.
"""

from __future__ import annotations

from phalanx.plan.workload import has_error_feedback

TOLERANCE_OF_CAST = {"fp16": 5e-3, "bf16": 4e-2}
"""Rounding is 5e-4 and 4e-3 of each rank's gradient; their sum is smaller where they cancel, and is
rounded, too."""

JUDGED_BY_PLAIN = ("topk",)
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
