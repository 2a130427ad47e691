"""Fewer points that still tell the truth: extremes per bucket for lines, equal buckets, a
smoothed curve."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise

from phalanx.report.formats import finite_or_zero

XsAndYs = tuple[list[float], list[float]]


def split_into_buckets(count: int, max_buckets: int) -> list[tuple[int, int]]:
    """Cut `count` rows into at most `max_buckets` runs of nearly equal length, as (begin, end)."""
    max_buckets = min(count, max_buckets)
    if not max_buckets:
        return []
    return list(pairwise(count * index // max_buckets for index in range(max_buckets + 1)))


def select_extremes(xs: Sequence[float], ys: Sequence[float], max_points: int) -> XsAndYs:
    """The lowest and highest point of each bucket, in order: a spike of one step survives.

    Gaps stay NaN.
    """
    if len(xs) <= max_points:
        return list(xs), [_finite_or_nan(value) for value in ys]
    rows: list[int] = []
    # Half as many buckets as points: each gives two.
    for start, end in split_into_buckets(len(xs), max_points // 2):
        finite = [row for row in range(start, end) if math.isfinite(ys[row])]
        if not finite:
            rows.append(start)
            continue
        low, high = min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)
        # In the order of steps, and once where both are the same point.
        rows += sorted({low, high})
    return [xs[row] for row in rows], [_finite_or_nan(ys[row]) for row in rows]


def _finite_or_nan(value: float) -> float:
    if math.isfinite(value):
        return value
    return math.nan


def compute_running_mean(ys: Sequence[float], span: int) -> list[float]:
    """The mean of the finite values among the `span` neighbours of each point, as many before it
    as after."""
    # Sums from the first value on: each mean is a difference of two, however long the span.
    sums, counts = [0.0], [0]
    for value in ys:
        sums.append(sums[-1] + finite_or_zero(value))
        counts.append(counts[-1] + math.isfinite(value))
    averages = []
    for row in range(len(ys)):
        start, end = max(row - span // 2, 0), min(row + span // 2 + 1, len(ys))
        count = counts[end] - counts[start]
        mean = math.nan
        if count:
            mean = (sums[end] - sums[start]) / count
        averages.append(mean)
    return averages


def compute_running_median(ys: Sequence[float], span: int) -> list[float]:
    """The (upper) median of the same neighbours."""
    window: list[float] = []  # sorted
    half, medians = span // 2, []
    # From before the first row on, which fills the window.
    for row in range(-half, len(ys)):
        arriving, leaving = row + half, row - half - 1
        if arriving < len(ys) and math.isfinite(ys[arriving]):
            insort(window, ys[arriving])
        if leaving >= 0 and math.isfinite(ys[leaving]):
            del window[bisect_left(window, ys[leaving])]
        if row >= 0 and window:
            medians.append(window[len(window) // 2])
        elif row >= 0:
            medians.append(math.nan)
    return medians
