"""How often a run fails, as far as its failures so far can tell: a rate, and never without their
number."""

from __future__ import annotations

import math

from phalanx.core.units import format_seconds, plural

MIN_FAILURES_OF_A_RATE = 2
"""One failure alone has no time between failures: of it only a least one can be said."""

# Of a normal distribution: 95 % on two sides, and on one.
_Z_TWO_SIDED, _Z_ONE_SIDED = 1.960, 1.645


def bound_time_between_failures(num_failures: int, alive_s: float) -> tuple[float, float]:
    """The 95 % interval, in seconds, of the mean time between failures that come by chance at one
    rate, by `num_failures` in `alive_s`. One failure gives a least time alone, and infinity.

    NaN without failures. By Byar's approximation to the limits of a Poisson count (Breslow and Day
    1987, volume II, formula 2.13), which is off by 8 % of the upper limit for two failures, and by
    less for more.
    """
    if num_failures < 1:
        return math.nan, math.nan
    if num_failures == 1:
        return alive_s / _compute_byar_limit(2, _Z_ONE_SIDED), math.inf
    most = _compute_byar_limit(num_failures + 1, _Z_TWO_SIDED)
    fewest = _compute_byar_limit(num_failures, -_Z_TWO_SIDED)
    return alive_s / most, alive_s / fewest


def _compute_byar_limit(count: float, z: float) -> float:
    return count * (1 - 1 / (9 * count) + z / (3 * math.sqrt(count))) ** 3


def describe_failure_rate(num_failures: int, alive_s: float) -> str:
    """ "3 failures in 1 h 00 m, one each 20 m 00 s (6 m 50 s to 1 h 38 m with 95 % confidence)"."""
    least_s, most_s = bound_time_between_failures(num_failures, alive_s)
    text = f"{plural(num_failures, 'failure')} in {format_seconds(alive_s)}"
    if num_failures < 1:
        return text
    if not math.isfinite(most_s):
        least = format_seconds(least_s)
        return f"{text} (in the mean at least {least} between two, with 95 % confidence)"
    interval = f"{format_seconds(least_s)} to {format_seconds(most_s)}"
    each = format_seconds(alive_s / num_failures)
    return f"{text}, one each {each} ({interval} with 95 % confidence)"
