"""The file system of the run is read-only for some steps with a save among them; then it can be
written again."""

from __future__ import annotations

from dataclasses import replace

from phalanx.resilience.after_steps import call_after_steps
from phalanx.resilience.expectation import REFUSED_SAVE
from phalanx.resilience.fault import FaultSite
from phalanx.resilience.own_mounts import make_read_only, make_writable

EXPECTATION = replace(REFUSED_SAVE, stage="own_mounts", says="Read-only file system")
NUM_READ_ONLY_STEPS = 12


def inject(site: FaultSite) -> None:
    """Mount the run's directory read-only over itself, for twelve steps.

    The real condition: the kernel refuses to make, rename or remove anything there (EROFS). What is
    open by then, the events and the log, is written on, as the kernel asks when a file is opened.
    Raises EnvironmentProblem where the run shares its mounts with others.
    """
    make_read_only(site.run_dir)
    call_after_steps(site, NUM_READ_ONLY_STEPS, lambda: make_writable(site.run_dir))
