"""One rank calls a collective of another size than the others: garbage, or an abort, where nobody
compares."""

from __future__ import annotations

import torch
import torch.distributed as dist

from phalanx.resilience.expectation import Ending, Expectation

EXPECTATION = Expectation(
    verdict="ranks disagree",
    ending=Ending.STOPS,
    trained_again_s=None,
    exit_code=7,
    is_named_by_majority=True,
    phases=("data", "forward"),
    overrides=("resilience.check_collectives=all",),
)


def inject() -> None:
    """Reduce one number over all ranks, where the others call something else."""
    dist.all_reduce(torch.zeros(1))
