"""Steps the wall clock of a run whose processes have one of their own."""

from __future__ import annotations

import os
import struct

from phalanx.core.errors import EnvironmentProblem
from phalanx.resilience.expectation import NO_VERDICT, Expectation

# Nothing is found, and nothing is lost: only the monotonic clock decides anything.
EXPECTATION = Expectation(
    verdict=NO_VERDICT,
    detected_s=None,
    trained_again_s=None,
    may_lose_steps=False,
    names_rank=False,
    settling_steps=12,
    stage="stepped_clock",
)
CLOCK_VARIABLE = "CLOCK_STEP"
"""The file with the seconds that are added to the machine's clock, as a C long."""
SECONDS = struct.Struct("l")


def step_clock_of_run(seconds: float) -> None:
    """Let the clock of all processes of this run be so many seconds away from the machine's.

    Raises EnvironmentProblem where they have the machine's.
    """
    path = os.environ.get(CLOCK_VARIABLE)
    if path is None:
        raise EnvironmentProblem(
            "this fault steps a clock that the run has for itself, and it has none",
            fix="run it by phalanx drill",
        )
    # In place: the processes have mapped this file, and not another one of its name.
    with open(path, "r+b") as file:
        file.write(SECONDS.pack(int(seconds)))
