"""How far gradients may be off in a narrow type, in a few numbers and in words.

Torch-free.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from phalanx.verify.number_types import COMPUTE_OF_NARROW_DTYPE
from phalanx.verify.trace_facts import Trace


@dataclass(frozen=True)
class GradientErrorBands:
    """The narrowest, median and widest band of the gradients that are judged, relative to their
    size; `widest_name`: which gradient has the widest. Zeros where none is judged."""

    narrowest: float
    median: float
    widest: float
    widest_name: str


def summarize_error_bands(trace: Trace) -> GradientErrorBands:
    """The bands of a trace that has a `rounding_dtype`."""
    bands = {name: band for name, band in trace.bands().items() if band < math.inf}
    if not bands:
        return GradientErrorBands(0.0, 0.0, 0.0, "")
    widest_name = max(bands, key=lambda name: bands[name])
    return GradientErrorBands(
        min(bands.values()), statistics.median(bands.values()), bands[widest_name], widest_name
    )


def describe_error_bands(trace: Trace) -> str:
    """The bands of a trace that has a `rounding_dtype`, in a sentence."""
    bands = summarize_error_bands(trace)
    compute = COMPUTE_OF_NARROW_DTYPE[trace.rounding_dtype]
    if not bands.widest_name:
        return f"{compute}: no gradient is judged, for rounding changes all by half"
    norm = trace.scalar_tolerance("grad_norm", 0.0)
    loss = trace.scalar_tolerance("loss", 0.0)
    return (
        f"{compute}: gradients may be off by {_format_percent(bands.narrowest)} to"
        f" {_format_percent(bands.widest)} (widest: {bands.widest_name}; median"
        f" {_format_percent(bands.median)}), their norm by {_format_percent(norm)},"
        f" the loss by {_format_percent(loss)}:"
        f" {trace.allowed_roundings} x what weights rounded otherwise change in one process"
    )


def _format_percent(share: float) -> str:
    return f"{100 * share:.2g} %"
