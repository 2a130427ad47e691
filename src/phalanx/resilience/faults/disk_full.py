"""The disk of the run is full for some steps with a save among them; then there is room again."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from phalanx.core.files import create_regular_file
from phalanx.resilience.after_steps import call_after_steps
from phalanx.resilience.expectation import REFUSED_SAVE
from phalanx.resilience.fault import FaultSite

EXPECTATION = replace(REFUSED_SAVE, stage="small_disk")
NUM_FULL_STEPS = 12
FILLER_NAME = "filler"
# A checkpoint must not fit; an event must.
LEFT_BYTES = 200 << 10


def inject(site: FaultSite) -> None:
    """Fill the file system of the run but for 200 KiB, for twelve steps.

    The drill gives the run a small one of its own.
    """
    filler = site.run_dir / FILLER_NAME
    with create_regular_file(filler, buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        file.truncate(max(0, file.tell() - LEFT_BYTES))
    call_after_steps(site, NUM_FULL_STEPS, filler.unlink)
