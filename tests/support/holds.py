"""Faults that hold a rank near the end of a short run until the test has done what it does to it: on
a busy machine the run would be finished before.

Runs import a copy of this file. While one rank is held the others wait for it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.resilience.fault import FaultSite

UNWATCHED = "resilience.hang_s=0"
"""No watch takes the held rank for one that hangs."""
GO_ON = "held ranks go on"
"""A file in the folder of the command."""
_LIMIT_S = 120.0


def holding(folder: Path, how: str, step: int) -> tuple[str, str]:
    """What a job needs whose command runs in `folder`, for a fault of its first attempt."""
    return UNWATCHED, f'resilience.inject=["{make_fault(folder, how, step)}"]'


def make_fault(folder: Path, how: str, step: int, *, attempt: int = 0) -> str:
    """The text of a fault that holds rank 0 of one attempt: one that continues is not held."""
    shutil.copy(__file__, folder)
    return f"holds:{how}:rank=0,step={step},phase=data,attempt={attempt}"


def until_stop(site: FaultSite) -> None:
    """Until this rank has been asked to stop."""
    trainer: Any = site.trainer
    _wait_until(lambda: trainer.stop.sigterm or trainer.stop.sigint)


def until_told() -> None:
    """Until there is a file GO_ON."""
    _wait_until(Path(GO_ON).exists)


def until_killed() -> None:
    _wait_until(lambda: False)


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
