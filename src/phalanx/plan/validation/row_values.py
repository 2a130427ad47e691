"""Values of a row as they are written in files of many hands: checked, or refused with a reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Beyond these nobody has trained: a typo, or another unit.
MAX_INT = 10**9
MAX_STEP_S = 1e6


class UnusableRow(Exception):
    """A row that cannot be predicted or scored. Its text is the reason, in words that rows share,
    by which they are counted."""


def get_finite_number(row: Mapping[str, Any], key: str) -> float | None:
    """The finite number at `key`; None where there is none, or something else."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def get_optional_positive_int(row: Mapping[str, Any], key: str) -> int | None:
    """The whole number above 0 at `key`; None where there is none. Raises UnusableRow for a number
    that cannot be one."""
    value = get_finite_number(row, key)
    if value is None or value == 0:
        return None
    if value < 0 or value > MAX_INT or value != int(value):
        raise UnusableRow(f"absurd {key}")
    return int(value)


def get_positive_int(row: Mapping[str, Any], key: str) -> int:
    """The whole number above 0 at `key`. Raises UnusableRow where there is none."""
    value = get_optional_positive_int(row, key)
    if value is None:
        raise UnusableRow(f"no {key}")
    return value


def get_text(row: Mapping[str, Any], key: str) -> str:
    """The text at `key`; "" where there is none. True and False are their names."""
    value = row.get(key)
    if value is None:
        return ""
    return str(value)
