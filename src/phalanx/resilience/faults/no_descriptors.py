"""One rank can open no file for some steps with a save among them, as after a leak of descriptors;
then it can again."""

from __future__ import annotations

import os
import resource
from dataclasses import replace

from phalanx.resilience.after_steps import call_after_steps
from phalanx.resilience.expectation import REFUSED_SAVE
from phalanx.resilience.fault import FaultSite

EXPECTATION = replace(REFUSED_SAVE, says="ulimit -n")
NUM_STEPS_WITHOUT = 12


def inject(site: FaultSite) -> None:
    """Open files until the kernel refuses (EMFILE), and whatever is closed again, for twelve steps.

    The real condition, sooner than by its usual limit: that is lowered to what the rank has open.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most_open = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_open + 1, limits[1]))
    taken: list[int] = []

    def take_all() -> None:
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return

    def give_back() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)

    take_all()
    call_after_steps(site, NUM_STEPS_WITHOUT, give_back, meanwhile=take_all)
