"""What ranks send each other to reduce gradients: the collectives of one group, each counted in
bytes.

A rank's bytes are those of the bandwidth-optimal algorithms (ring), per rank and step: an
all-reduce of n bytes over w ranks sends 2 (w - 1) / w n, a reduce-scatter or an all-to-all (w - 1)
/ w n, an all-gather of own n bytes (w - 1) n.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from phalanx.core.phases import Phases


@dataclass
class Traffic:
    """Bytes this rank sends to reduce gradients; `plain_bytes` is what a step would send in
    fp32, uncompressed."""

    plain_bytes: int = 0
    _sent_bytes: float = 0.0

    def all_reduce(self, num_bytes: int, num_ranks: int) -> None:
        self._sent_bytes += all_reduce_bytes(num_bytes, num_ranks)

    def scatter(self, num_bytes: int, num_ranks: int) -> None:
        """A reduce-scatter, or an all-to-all, of a whole of `num_bytes`."""
        self._sent_bytes += num_bytes * (num_ranks - 1) / num_ranks

    def all_gather(self, own_bytes: int, num_ranks: int) -> None:
        self._sent_bytes += own_bytes * (num_ranks - 1)

    def take(self) -> int:
        """Bytes since the last `take`."""
        num_bytes, self._sent_bytes = round(self._sent_bytes), 0.0
        return num_bytes


def all_reduce_bytes(num_bytes: int, num_ranks: int) -> float:
    return 2 * num_bytes * (num_ranks - 1) / num_ranks


class Wire:
    """The collectives of `group`, in the order of calls: each returns with its result there (on
    a GPU: queued)."""

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic, phases: Phases) -> None:
        self.num_ranks, self.rank = group.size(), group.rank()
        self._group, self._traffic, self._phases = group, traffic, phases

    def add_up(self, tensor: torch.Tensor) -> None:
        """The sum over ranks, in place; the same bits on every rank."""
        self._traffic.all_reduce(tensor.nbytes, self.num_ranks)
        with self._phases("collective", "all_reduce compressed gradients"):
            dist.all_reduce(tensor, group=self._group)

    def largest(self, tensor: torch.Tensor) -> None:
        """The maximum over ranks, in place."""
        self._traffic.all_reduce(tensor.nbytes, self.num_ranks)
        with self._phases("collective", "all_reduce compressed gradients"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """[ranks, *mine.shape]"""
        gathered = torch.empty(self.num_ranks, *mine.shape, dtype=mine.dtype, device=mine.device)
        self._traffic.all_gather(mine.nbytes, self.num_ranks)
        with self._phases("collective", "all_gather compressed gradients"):
            dist.all_gather_into_tensor(
                gathered.view(-1), mine.contiguous().view(-1), group=self._group
            )
        return gathered

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """`parts` [ranks, ...]: row r goes to rank r; returned is what each rank had for this
        one."""
        received = torch.empty_like(parts)
        self._traffic.scatter(parts.nbytes, self.num_ranks)
        with self._phases("collective", "all_to_all compressed gradients"):
            dist.all_to_all_single(received, parts.contiguous(), group=self._group)
        return received
