"""Processor seconds of commands, for deadlines that are not those of the machine's other work."""

from __future__ import annotations

import resource
from collections.abc import Callable


def measure_cpu_s(run: Callable[[], object]) -> float:
    """Processor seconds of the commands that `run` starts and waits for."""
    before_s = _sum_of_children_s()
    run()
    return _sum_of_children_s() - before_s


def _sum_of_children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
