"""From values to places on a chart, with ticks a person would choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class AxisScale:
    """Maps [low, high] to [0, 1], by value or by logarithm."""

    low: float
    high: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        if self.is_log:
            # On the floor: a logarithm has no place for it.
            if value <= 0:
                return 0.0
            return (math.log10(value) - math.log10(self.low)) / (
                math.log10(self.high) - math.log10(self.low)
            )
        return (value - self.low) / (self.high - self.low)

    def tick_values(self, num_ticks: int = 5) -> list[float]:
        if self.is_log:
            return _choose_log_ticks(self.low, self.high)
        return choose_linear_ticks(self.low, self.high, num_ticks)


def choose_scale(
    values: Sequence[float], *, zero: bool = False, may_be_log: bool = False, snug: bool = False
) -> AxisScale:
    """A scale that shows all finite values.

    Logarithmic if allowed and they span more than two decades.

    `zero` begins at nought; `snug` ends exactly at the values (for steps) instead of at the next
    tick.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return AxisScale(0.0, 1.0)
    if may_be_log and (log_scale := _build_log_scale(finite)):
        return log_scale
    low, high = min(finite), max(finite)
    if zero:
        low = min(low, 0.0)
    is_from_zero = zero and low == 0
    # Equal values, up to rounding, would have no height: divisions by it come next.
    if not high - low > 1e-12 * max(abs(high), abs(low)):
        pad = abs(high) * 0.1 or 1.0
        high += pad
        if not is_from_zero:
            low -= pad
    if snug:
        return AxisScale(low, high)
    return _round_range_to_ticks(low, high, is_from_zero)


def _build_log_scale(finite: Sequence[float]) -> AxisScale | None:
    """A logarithmic scale for the positive values; None if they span two decades or less."""
    positive = [value for value in finite if value > 0]
    if not positive or max(positive) / min(positive) <= 100:
        return None
    return AxisScale(min(positive) / 1.15, max(positive) * 1.15, is_log=True)


def _round_range_to_ticks(low: float, high: float, is_from_zero: bool) -> AxisScale:
    """From a tick at or below `low` to one at or above `high`, where that leaves little room."""
    ticks = choose_linear_ticks(low, high, 5)
    step = (high - low) / 4
    if len(ticks) > 1:
        step = ticks[1] - ticks[0]
    # 1e-9: a value that is a tick up to rounding needs no further one.
    top = math.ceil(high / step - 1e-9) * step
    bottom = low
    if not is_from_zero:
        bottom = math.floor(low / step + 1e-9) * step
    # Rounding out to ticks must not squeeze the curve into half the chart.
    if not top - high < 0.5 * step:
        top = high + 0.05 * (high - low)
    if not low - bottom < 0.5 * step:
        bottom = low - 0.05 * (high - low)
    return AxisScale(bottom, top)


def choose_linear_ticks(low: float, high: float, num_ticks: int) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten inside [low, high], about `num_ticks` of
    them."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / num_ticks))
    # 0.999: rounding must not choose the next larger step.
    step = next(m * power for m in (1, 2, 2.5, 5, 10, 20) if m * power * num_ticks >= span * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def choose_whole_number_ticks(low: float, high: float, num_ticks: int) -> list[float]:
    """Ticks for steps: whole numbers only."""
    return select_whole_numbers(choose_linear_ticks(low, high, num_ticks))


def select_whole_numbers(ticks: Sequence[float]) -> list[float]:
    return [tick for tick in ticks if tick == round(tick)]


def _choose_log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    # At most seven decades have ticks.
    period = max(1, math.ceil(len(decades) / 7))
    factors: tuple[int, ...] = (1,)
    if len(decades) <= 5:
        factors = (1, 3)
    ticks = []
    for power in decades[::period]:
        ticks += [factor * 10.0**power for factor in factors]
    return [tick for tick in ticks if low <= tick <= high]


def format_ticks(ticks: Sequence[float]) -> list[str]:
    """[0, 5000, 10000] -> ['0', '5k', '10k']; 0.003 -> '0.003'; 1e-5 -> '1e-5'."""
    largest = max((abs(tick) for tick in ticks), default=0.0)
    return [_format_tick(tick, largest) for tick in ticks]


def _format_tick(value: float, largest: float) -> str:
    size = abs(value)
    if 0 < size < 1e-3:
        mantissa, _, power = f"{value:.3g}".partition("e")
        if power:
            return f"{mantissa}e{int(power)}"
        return mantissa
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # An axis that ends below 10,000 has no suffixes.
        if size >= limit and largest >= 1e4:
            return f"{value / limit:.6g}{suffix}"
    return f"{value:.6g}"
