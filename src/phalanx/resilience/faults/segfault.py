"""C code reads from address 0: a bug in an extension, or bad memory."""

from __future__ import annotations

import ctypes

from phalanx.resilience.expectation import Expectation

EXPECTATION = Expectation(verdict="segmentation fault")


def inject() -> None:
    """Read a string at address 0."""
    ctypes.string_at(0)
