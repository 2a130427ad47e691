"""Values of a row as they are written in files of many hands: checked, or refused with a reason.

What a row leaves out is None. What it states and cannot be is never taken for left out: a row that
is repaired in silence would be scored against the step time of another run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

# Beyond these nobody has trained: a typo, or another unit.
MAX_INT = 10**9
MAX_STEP_S = 1e6
UNSTATED_PATTERN = re.compile(
    r"unstated|unknown|unspecified|not in table|not stated|recipe|as needed"
)
"""Words by which a row says that it does not say."""


class UnusableRow(Exception):
    """A row that cannot be predicted or scored. Its text is the reason, in words that rows share,
    by which they are counted."""


def get_optional_number(row: Mapping[str, Any], key: str) -> float | None:
    """The finite number at `key`; None where there is nothing. Raises UnusableRow for anything
    else."""
    value = row.get(key)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise UnusableRow(f"absurd {key}")
    return float(value)


def get_optional_count(row: Mapping[str, Any], key: str) -> int | None:
    """The whole number from 0 on at `key`; None where there is nothing. Raises UnusableRow for
    anything else."""
    value = get_optional_number(row, key)
    if value is None:
        return None
    if value < 0 or value > MAX_INT or value != int(value):
        raise UnusableRow(f"absurd {key}")
    return int(value)


def get_optional_positive_int(row: Mapping[str, Any], key: str) -> int | None:
    """The whole number above 0 at `key`; None where there is nothing. Raises UnusableRow for
    anything else."""
    value = get_optional_count(row, key)
    if value == 0:
        raise UnusableRow(f"absurd {key}")
    return value


def get_positive_int(row: Mapping[str, Any], key: str) -> int:
    """The whole number above 0 at `key`. Raises UnusableRow where there is none."""
    value = get_optional_positive_int(row, key)
    if value is None:
        raise UnusableRow(f"no {key}")
    return value


def get_optional_bool(row: Mapping[str, Any], key: str) -> bool | None:
    """True or False at `key`; None where there is nothing. Raises UnusableRow for anything else."""
    value = row.get(key)
    if value is not None and not isinstance(value, bool):
        raise UnusableRow(f"absurd {key}")
    return value


def get_text(row: Mapping[str, Any], key: str) -> str:
    """The text at `key`; "" where there is none. True and False are their names."""
    value = row.get(key)
    if value is None:
        return ""
    return str(value)
