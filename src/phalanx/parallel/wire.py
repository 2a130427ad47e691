"""Wire: what ranks send each other to reduce gradients, the collectives of one group, each counted
in bytes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from phalanx.core.phases import PhaseTimer
from phalanx.parallel.traffic import GradientTraffic


class Wire:
    """The collectives of `group`, in the order of calls: each returns with its result there (on
    a GPU: queued)."""

    def __init__(
        self, group: dist.ProcessGroup, traffic: GradientTraffic, phases: PhaseTimer
    ) -> None:
        # Collectives only: sums in another order on each rank would give ranks different bits.
        self.num_ranks, self.rank = group.size(), group.rank()
        self._group, self._traffic, self._phases = group, traffic, phases

    def sum_over_ranks(self, tensor: torch.Tensor) -> None:
        """The sum over ranks, in place; the same bits on every rank."""
        self._traffic.add_all_reduce(tensor.nbytes, self.num_ranks)
        with self._phases("collective", "all_reduce compressed gradients", axis="dp"):
            dist.all_reduce(tensor, group=self._group)

    def max_over_ranks(self, tensor: torch.Tensor) -> None:
        """The maximum over ranks, in place."""
        self._traffic.add_all_reduce(tensor.nbytes, self.num_ranks)
        with self._phases("collective", "all_reduce compressed gradients", axis="dp"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """[ranks, *row.shape]"""
        gathered = torch.empty(self.num_ranks, *row.shape, dtype=row.dtype, device=row.device)
        self._traffic.add_all_gather(row.nbytes, self.num_ranks)
        with self._phases("collective", "all_gather compressed gradients", axis="dp"):
            dist.all_gather_into_tensor(
                gathered.view(-1), row.contiguous().view(-1), group=self._group
            )
        return gathered

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """`parts` [ranks, ...]: row r goes to rank r; returned is what each rank had for this
        one."""
        received = torch.empty_like(parts)
        self._traffic.add_reduce_scatter(parts.nbytes, self.num_ranks)
        with self._phases("collective", "all_to_all compressed gradients", axis="dp"):
            dist.all_to_all_single(received, parts.contiguous(), group=self._group)
        return received
