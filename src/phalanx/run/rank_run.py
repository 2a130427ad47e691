"""What one rank of a training run is given. Torch-free: the process that prepares a run makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.job.schema import Job
from phalanx.plan.plan import Plan


@dataclass(frozen=True)
class RankRun:
    """What one rank is to run. `started_s` (monotonic) is when the person pressed return."""

    job: Job
    plan: Plan
    run_dir: Path
    rank: int
    attempt: int
    started_s: float
    epoch: int = 0
    """Number of the job's claim on the run directory; 0 where claims are not counted."""
    holder: Mapping[str, Any] | None = None
    """The holder of the lock on the run directory, as JSON: the job's supervisor."""
    report_error: Callable[[BaseException], object] = lambda error: None
    """Tells the launcher why this rank fails, before anything that may wait for other ranks. May be called twice."""
    tell_done: Callable[[], object] = lambda: None
    """Tells the launcher that this rank's work is done, whatever comes of the sample of text and the way out."""
    pass_on: Callable[[str], object] = lambda line: None
    """Shows the line of an event that the disk did not take to the person who watches."""
