"""The disk takes seconds for what is written of a checkpoint, for some steps; then it is fast
again."""

from __future__ import annotations

from phalanx.resilience.after_steps import call_after_steps
from phalanx.resilience.expectation import NO_VERDICT, Expectation
from phalanx.resilience.failing_disk import fail_writes_below
from phalanx.resilience.fault import FaultSite

EXPECTATION = Expectation(
    verdict=NO_VERDICT,
    detected_s=None,
    trained_again_s=None,
    may_lose_steps=False,
    names_rank=False,
    phases=("data",),
    stage="failing_disk",
    # The next save comes due before the last one, and is put off.
    settling_steps=16,
    says="waits: that of step",
)
NUM_SLOW_STEPS = 12
# Longer than a rank may stand still before it is called hung.
DELAY_MS = 6000
CHECKPOINTS_FOLDER = "checkpoints"


def inject(site: FaultSite) -> None:
    """Have each write and fsync below the run's checkpoints take six seconds longer that begins in
    the next twelve steps.

    An injected delay of the system's call. Raises EnvironmentProblem where no library stands before
    these calls.
    """
    folder = site.run_dir / CHECKPOINTS_FOLDER
    fail_writes_below(folder, delay_ms=DELAY_MS)
    call_after_steps(site, NUM_SLOW_STEPS, lambda: fail_writes_below(folder))
