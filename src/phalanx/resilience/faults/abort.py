"""C code gives up: a failed assertion in a library, as std::terminate or abort()."""

from __future__ import annotations

import os

from phalanx.resilience.expectation import Expectation

EXPECTATION = Expectation(verdict="aborted")


def inject() -> None:
    os.abort()
