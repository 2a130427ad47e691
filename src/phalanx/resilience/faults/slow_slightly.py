"""One rank takes 1.3 times as long, as on a processor that is throttled a little: stopped 23 ms of
each 100 ms."""

from __future__ import annotations

from phalanx.resilience.faults.slow import EXPECTATION, stop_by_turns

__all__ = ["EXPECTATION", "inject"]

FACTOR = 1.3
PERIOD_S = 0.1


def inject() -> None:
    """Give this process 1/1.3 of its time, for 20 s, by a child process that stops it by turns."""
    running_s = PERIOD_S / FACTOR
    stop_by_turns(PERIOD_S - running_s, running_s)
