"""The process is gone while a checkpoint is written, before its commit, or right after it."""

from __future__ import annotations

from phalanx.resilience.expectation import SAVE_PHASES, Expectation
from phalanx.resilience.faults.kill import inject

__all__ = ["EXPECTATION", "inject"]

EXPECTATION = Expectation(verdict="killed", phases=SAVE_PHASES, strikes_at_saves=True)
