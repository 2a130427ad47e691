"""A library ends the process with code 0 before the work is done."""

from __future__ import annotations

import os

from phalanx.resilience.expectation import Expectation

EXPECTATION = Expectation(verdict="left early")


def inject() -> None:
    """os._exit(0): nothing is flushed, closed or reported."""
    os._exit(0)
