"""The wall clock of all processes of the run jumps an hour ahead, as after a clock was set."""

from __future__ import annotations

from phalanx.resilience.clock_step import EXPECTATION, step_clock_of_run

__all__ = ["EXPECTATION", "inject"]


def inject() -> None:
    """Step the clock of the run an hour ahead."""
    step_clock_of_run(3600.0)
