"""The disk answers each write of a checkpoint with EIO for some steps; then it works again."""

from __future__ import annotations

import errno
from dataclasses import replace

from phalanx.resilience.after_steps import call_after_steps
from phalanx.resilience.expectation import REFUSED_SAVE
from phalanx.resilience.failing_disk import fail_writes_below
from phalanx.resilience.fault import FaultSite

EXPECTATION = replace(REFUSED_SAVE, stage="failing_disk", says="Input/output error")
NUM_FAILING_STEPS = 12
CHECKPOINTS_FOLDER = "checkpoints"


def inject(site: FaultSite) -> None:
    """Have each write and fsync below the run's checkpoints fail with EIO, for twelve steps and
    with a save among them.

    An injected error of the system's call: no block device here could be made to fail and then to
    work again. Raises EnvironmentProblem where no library stands before these calls.
    """
    folder = site.run_dir / CHECKPOINTS_FOLDER
    fail_writes_below(folder, error=errno.EIO)
    call_after_steps(site, NUM_FAILING_STEPS, lambda: fail_writes_below(folder))
