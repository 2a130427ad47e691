"""Numbers of a run as text, each with its unit; a value that was never measured says so."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from phalanx.core.units import format_bytes, format_count, format_seconds
from phalanx.observe.events import EvalFinished

NOT_MEASURED_TEXT = "not measured"


def number_or_nan(value: Any) -> float:
    """The value if it is a number of ordinary size, else NaN: JSON from a run directory may hold
    anything."""
    if is_number_of_ordinary_size(value):
        return float(value)
    return math.nan


def int_or_none(value: Any) -> int | None:
    if not is_number_of_ordinary_size(value):
        return None
    return int(value)


def is_number_of_ordinary_size(value: Any) -> bool:
    # bool is an int in Python.
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def finite_or_zero(value: float) -> float:
    if math.isfinite(value):
        return value
    return 0.0


def dict_or_empty(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    return {}


def list_or_empty(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return []


def text_or_missing(value: Any, missing: str = NOT_MEASURED_TEXT) -> str:
    if value is None or value == "":
        return missing
    return str(value)


def format_seconds_or_missing(value: float) -> str:
    if math.isfinite(value):
        return format_seconds(value)
    return NOT_MEASURED_TEXT


def format_milliseconds(value: float) -> str:
    """Step times side by side keep one unit, so that they can be compared at a glance."""
    if not math.isfinite(value):
        return NOT_MEASURED_TEXT
    ms = value * 1e3
    if ms >= 100:
        return f"{ms:,.0f} ms"
    if ms >= 1:
        return f"{ms:.1f} ms"
    return f"{ms:.3f} ms"


def format_num_bytes(value: float) -> str:
    if math.isfinite(value):
        return format_bytes(value)
    return NOT_MEASURED_TEXT


def format_rounded_count(value: float) -> str:
    if math.isfinite(value):
        return format_count(value)
    return NOT_MEASURED_TEXT


def format_loss(value: float, unit: str) -> str:
    if math.isfinite(value):
        return f"{value:.4f} {unit}".rstrip()
    return NOT_MEASURED_TEXT


def format_percent(part: float, total: float) -> str:
    if not (math.isfinite(part) and math.isfinite(total) and total):
        return "–"
    # `or`: never "-0.0".
    value = round(100 * part / total, 1) or 0.0
    return f"{value:.1f} %"


def describe_compared_metric(event: EvalFinished) -> str:
    """The value an evaluation is compared by: its loss, or the name and value of another metric."""
    name = "" if event.judged_by == "loss" else f"{event.judged_by} "
    return f"{name}{event.value_of(event.judged_by):.4f}"


def format_timestamp(unix_s: float) -> str:
    """2026-01-31 14:02:11 UTC."""
    if not math.isfinite(unix_s):
        return "at an unknown time"
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def is_same_layout(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """True if both split the same axes alike; an axis of degree 1 may be left out."""
    wide = [
        {axis: degree for axis, degree in degrees.items() if degree != 1}
        for degrees in (first, second)
    ]
    return wide[0] == wide[1]


def format_layout(degrees: dict[str, Any]) -> str:
    """Only the axes that split something: 'dp_replicate=2 x tp=2'."""
    if not degrees:
        return "not recorded"
    wide = [f"{axis}={degree}" for axis, degree in degrees.items() if degree != 1]
    return " x ".join(wide) or "one rank"
