"""Numbers as people read them: bytes, seconds, counts."""

from __future__ import annotations

import math

KIB, MIB, GIB = 2**10, 2**20, 2**30


def format_bytes(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        num_digits = 0 if unit == "B" else 1
        # Rounded first: 1023.97 KiB is not shown as 1024.0 KiB.
        if round(abs(value), num_digits) < 1024 or unit == "EiB":
            return f"{value:.{num_digits}f} {unit}"
        value /= 1024
    raise AssertionError


def format_count(count: float) -> str:
    """1234567 -> '1.23 M'."""
    value = float(count)
    for unit in ("", "K", "M", "B", "T"):
        if round(abs(value)) < 1000 or unit == "T":
            if unit == "":
                return f"{value:.0f}"
            # Three digits, as they are after rounding.
            if abs(value) < 9.995:
                return f"{value:.2f} {unit}"
            if abs(value) < 99.95:
                return f"{value:.1f} {unit}"
            return f"{value:.0f} {unit}"
        value /= 1000
    raise AssertionError


def format_seconds(seconds: float) -> str:
    """0.0123 -> '12.3 ms'; 75 -> '1 m 15 s'; 3725 -> '1 h 02 m'."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole_seconds = round(seconds)
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} m {whole_seconds % 60:02d} s"
    return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60:02d} m"


def describe_prediction_error(predicted: float, measured: float) -> str:
    """A prediction's error as text, in % of the measurement: '4 % too low', '12 % too high',
    'right to 1 %'.

    Every place that shows a prediction beside a measurement says it in these words. '–' where one
    of them is missing.
    """
    if not (math.isfinite(predicted) and math.isfinite(measured)) or (
        predicted != measured and measured <= 0
    ):
        return "–"
    # Equal ones first: both may be 0.
    if predicted == measured or abs(predicted - measured) / measured < 0.005:
        return "right to 1 %"
    error = (predicted - measured) / measured
    return f"{100 * abs(error):.0f} % too {_describe_error_direction(predicted, measured)}"


def _describe_error_direction(predicted: float, measured: float) -> str:
    if predicted < measured:
        return "low"
    return "high"


SMALL_BYTES, LARGE_ERROR = 64 * MIB, 0.25


def describe_predicted_bytes_error(predicted: float, measured: float) -> str:
    """A prediction's error in bytes as text: in %, or as '5.6 MiB too high' if the memory is small
    and the error is not: what is there of it is mostly what allocators round up and libraries take
    once, and a percentage says nothing of larger jobs."""
    is_known = math.isfinite(predicted) and math.isfinite(measured) and measured > 0
    is_small = is_known and min(predicted, measured) < SMALL_BYTES
    if not is_small or abs(predicted - measured) < LARGE_ERROR * measured:
        return describe_prediction_error(predicted, measured)
    difference = format_bytes(abs(predicted - measured))
    return f"{difference} too {_describe_error_direction(predicted, measured)}"


def plural(number: int, noun: str, nouns: str = "") -> str:
    """A number and what it counts: '1 rank', '2 ranks', '1,500 steps'.

    `nouns`: of many, where an s is not enough.
    """
    if number == 1:
        return f"{number:,} {noun}"
    return f"{number:,} {nouns or f'{noun}s'}"
