"""Percentiles that are one of the values, and never between two."""

from __future__ import annotations

import math


def compute_weighted_percentile(ordered: list[tuple[float, int]], fraction: float) -> float:
    """The smallest of the sorted (value, count) that at least `fraction` of all counts do not
    exceed; NaN of none."""
    least = fraction * sum(count for _, count in ordered)
    num_so_far = 0
    for value, count in ordered:
        num_so_far += count
        if num_so_far >= least:
            return value
    return math.nan


def compute_percentile(ordered: list[float], fraction: float) -> float:
    """The smallest of the sorted values that at least `fraction` of them do not exceed; NaN of
    none."""
    if not ordered:
        return math.nan
    return ordered[max(math.ceil(fraction * len(ordered)) - 1, 0)]


def compute_median_of_finite(values: list[float]) -> float:
    return compute_percentile(sorted(value for value in values if math.isfinite(value)), 0.5)
