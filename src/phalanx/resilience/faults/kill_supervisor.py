"""The process that the user started is gone: nobody watches the ranks."""

from __future__ import annotations

from phalanx.resilience.expectation import Ending, Expectation
from phalanx.resilience.fault import FaultSite
from phalanx.resilience.run_processes import find_supervisor

EXPECTATION = Expectation(
    verdict="ended with it",
    ending=Ending.RESUMES,
    detected_s=5.0,
    trained_again_s=None,
    names_rank=False,
    exit_code=-9,
)


def inject(site: FaultSite) -> None:
    """SIGKILL to the supervisor of this run."""
    find_supervisor(site.run_dir).kill()
