"""User code raises: the exception every training script meets one day."""

from __future__ import annotations

from phalanx.resilience.expectation import Expectation

EXPECTATION = Expectation(verdict="exception")


class InjectedCrash(RuntimeError):
    """Raised by the fault `crash`."""


def inject() -> None:
    raise InjectedCrash("injected by resilience.inject")
