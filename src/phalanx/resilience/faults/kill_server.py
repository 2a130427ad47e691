"""The process that forks ranks is gone, and the ranks with it."""

from __future__ import annotations

from phalanx.resilience.expectation import Expectation
from phalanx.resilience.run_processes import find_server

EXPECTATION = Expectation(verdict="server killed", names_rank=False)


def inject() -> None:
    """SIGKILL to the parent of the ranks."""
    find_server().kill()
