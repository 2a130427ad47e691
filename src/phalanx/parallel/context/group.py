"""What ranks of cp send each other, and how many bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from phalanx.core.phases import PhaseTimer
from phalanx.mesh.devices import is_on_cpu
from phalanx.mesh.gloo_collectives import all_gather_rows_in_place, reduce_scatter_rows
from phalanx.parallel.context.chunks import SequenceChunksOfRanks

# Tags, because both kinds are under way together.
KEYS, GRADIENTS = 1, 2


@dataclass
class ContextGroup:
    """The ranks that have the other tokens of the same sequences.

    `sent_bytes` counts what this rank has sent.
    """

    group: dist.ProcessGroup
    chunks: SequenceChunksOfRanks
    phases: PhaseTimer
    sent_bytes: float = field(default=0.0)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return self.chunks.size

    def start_ring_exchange(self, tensor: torch.Tensor, tag: int) -> Callable[[], torch.Tensor]:
        """Begin to send `tensor` to the next rank and to receive the previous one's, which the
        result waits for."""
        arrived = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        # Ranks of a ring send to the next one and receive from the one before.
        after, before = (
            dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1)
        )
        tensor = tensor.contiguous()
        # In one batch: in a ring of NCCL each send would wait for a receive that stands behind
        # another send.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, after, self.group, tag),
                dist.P2POp(dist.irecv, arrived, before, self.group, tag),
            ]
        )
        self.sent_bytes += tensor.nbytes

        def wait() -> torch.Tensor:
            with self.phases("collective", "ring attention", axis="cp"):
                for work in works:
                    work.wait()
            return arrived

        return wait

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[ranks, ...]: everyone's."""
        rows = torch.empty(self.size, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
        rows[self.rank] = tensor
        self.sent_bytes += tensor.nbytes * (self.size - 1)
        with self.phases("collective", "all_gather keys and values", axis="cp"):
            all_gather_rows_in_place(rows, self.group)
        return rows

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of this rank's row of `rows` [ranks, ...], which is spent."""
        self.sent_bytes += rows[0].nbytes * (self.size - 1)
        with self.phases("collective", "reduce_scatter gradients of keys and values", axis="cp"):
            if is_on_cpu(rows):
                return reduce_scatter_rows(rows, self.group)
            rank_rows = torch.empty_like(rows[0])
            dist.reduce_scatter_tensor(rank_rows, rows, group=self.group)
            return rank_rows

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """[ranks, ...]: of each rank the row that it has for this one."""
        rows = rows.contiguous()
        arrived = torch.empty_like(rows)
        self.sent_bytes += rows[0].nbytes * (self.size - 1)
        with self.phases("collective", "all_to_all heads", axis="cp"):
            dist.all_to_all_single(arrived, rows, group=self.group)
        return arrived

    def broadcast_from_rank_of_last_token(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value of the rank with the last token, on every rank, on the device where
        `value` is."""
        # NCCL takes no tensors of the host.
        sent = value.to("cuda") if dist.get_backend(self.group) == "nccl" else value
        sent = sent.contiguous()
        source = dist.get_global_rank(self.group, self.chunks.rank_of_last_token)
        dist.broadcast(sent, source, group=self.group)
        return sent.to(value.device)
