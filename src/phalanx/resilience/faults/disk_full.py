"""The disk of the run is full for three saves; then there is room again."""

from __future__ import annotations

import contextlib

from phalanx.core.files import create_regular_file
from phalanx.resilience.expectation import Expectation
from phalanx.resilience.fault import FaultSite

EXPECTATION = Expectation(
    verdict="save failed",
    detected_s=None,
    detected_steps=10,
    trained_again_s=None,
    may_lose_steps=False,
    names_rank=False,
    phases=("data",),
    needs_root=True,
)
FILLER_NAME = "filler"
# A checkpoint must not fit; an event must.
LEFT_BYTES = 200 << 10


def inject(site: FaultSite) -> None:
    """Fill the file system of the run but for 200 KiB. The drill gives the run a small one of its
    own."""
    with create_regular_file(site.run_dir / FILLER_NAME, buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        file.truncate(max(0, file.tell() - LEFT_BYTES))
