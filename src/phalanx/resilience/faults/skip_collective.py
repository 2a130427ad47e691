"""One rank enters a collective that no other one enters: `if rank == 1: barrier()`."""

from __future__ import annotations

import torch.distributed as dist

from phalanx.resilience.expectation import HANG_DETECTION, HANG_RECOVERY_S, Expectation

EXPECTATION = Expectation(
    verdict="absent collective",
    detected_s=HANG_DETECTION,
    trained_again_s=HANG_RECOVERY_S,
    phases=("data", "forward"),
)


def inject() -> None:
    """Enter a barrier of all ranks, alone."""
    dist.barrier()
