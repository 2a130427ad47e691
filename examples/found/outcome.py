"""Runs one of the reproductions of this folder as a program: what comes out, what should."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Outcome:
    """What a library computed on this rank, and what one process computes."""

    computed: torch.Tensor
    expected: torch.Tensor

    @property
    def is_wrong(self) -> bool:
        """True while the library has the bug."""
        if self.computed.shape != self.expected.shape:
            return True
        return not torch.allclose(self.computed, self.expected, rtol=1e-5, atol=0)


def report(reproduce: Callable[[], Outcome]) -> None:
    """Run `reproduce` on each rank that torchrun started, and print the outcome of the last one.

    Exits with 1 while the bug is there, and with 0 where it is mended.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    outcome = reproduce()
    if dist.get_rank() == dist.get_world_size() - 1:
        print(f"torch {torch.__version__}, rank {dist.get_rank()}")
        print(f"computed {outcome.computed.tolist()}\nexpected {outcome.expected.tolist()}")
        print("wrong" if outcome.is_wrong else "right: mended in this version")
    dist.destroy_process_group()
    sys.exit(int(outcome.is_wrong))
