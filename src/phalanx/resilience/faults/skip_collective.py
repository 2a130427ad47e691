"""One rank enters a collective that the others never enter: `if rank == 1: all_reduce(...)`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from phalanx.resilience.expectation import HANG_DETECTION, HANG_RECOVERY_S, Expectation

EXPECTATION = Expectation(
    verdict="absent collective",
    detected_s=HANG_DETECTION,
    trained_again_s=HANG_RECOVERY_S,
    phases=("data", "forward"),
)


def inject() -> None:
    """Reduce one number over all ranks, of which no other one does it."""
    dist.all_reduce(torch.zeros(1))
