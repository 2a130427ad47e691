"""The process that holds the ranks' rendezvous store is gone."""

from __future__ import annotations

from phalanx.resilience.expectation import Expectation
from phalanx.resilience.run_processes import find_store

# The ranks go on, and meet again at a new store when they come to need one.
EXPECTATION = Expectation(verdict="store killed", names_rank=False, ranks_go_on=True)


def inject() -> None:
    """SIGKILL to the process that listens on MASTER_PORT."""
    find_store().kill()
