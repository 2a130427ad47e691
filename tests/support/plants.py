"""Which planted bugs `make test` has the time for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(plants: Iterable[Any], every: int = 2) -> list[Any]:
    """The plants, of which only each second (or third, ...) is for `make test`: the others are
    `long`."""
    return [
        pytest.param(plant, marks=[pytest.mark.long] * bool(i % every))
        for i, plant in enumerate(plants)
    ]
