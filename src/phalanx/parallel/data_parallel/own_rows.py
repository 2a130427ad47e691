"""Gradients of ZeRO-1, averaged where they are needed: each rank gets the mean of the rows that it
updates, which sends half of what an all-reduce does. The other rows keep what this rank has
computed, or hold a mean as well, and nobody reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.core.block_sizes import get_block_sizes
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.compat import cut_and_concatenate_chunks
from phalanx.mesh.devices import is_on_cpu
from phalanx.mesh.gloo_collectives import reduce_scatter_rows
from phalanx.mesh.shared_memory.opening import find_transport_in_place
from phalanx.parallel.data_parallel.ddp_buckets import PostedBuckets, reduce_buckets_on_own_stream
from phalanx.parallel.data_parallel.unsharded_params import group_by_averaging_dtype
from phalanx.parallel.data_parallel.zero1 import RowsOfRank, find_rows_of_rank
from phalanx.parallel.traffic import GradientTraffic
from phalanx.plan.plan import Plan

# What people read of it.
REDUCE_SCATTER_GRADIENTS = "reduce_scatter gradients"
# Waits until what was posted has ended.
End = Callable[[], Any]
_CutGradient = tuple[torch.Tensor, RowsOfRank]


def can_scatter_gradients(plan: Plan, group: dist.ProcessGroup, parameter: nn.Parameter) -> bool:
    """True for the ranks of `group`, which train `parameter` under ZeRO-1, where that is quicker
    than to average all of each gradient: on GPUs, and where they read each other's memory. Over
    gloo it is not (25 MiB of two ranks on one host: 44 ms, and 26 ms averaged whole)."""
    is_on_gpu = not is_on_cpu(parameter)
    return plan.scatters_gradients and (is_on_gpu or find_transport_in_place(group) is not None)


class OwnRowsReduction:
    """Averages gradients over the ranks of `group`: of each its rows of this rank, or all of one
    that has none (`find_rows_of_rank`)."""

    def __init__(self, group: dist.ProcessGroup, traffic: GradientTraffic) -> None:
        self._group, self._traffic = group, traffic
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)

    def count_bytes(self, parameters: Iterable[nn.Parameter], traffic: GradientTraffic) -> None:
        """Add to `traffic` what this rank sends for gradients of the type of `parameters`."""
        for parameter in parameters:
            self._count_gradient(parameter.nbytes, self._find_rows(parameter), traffic)

    def _count_gradient(
        self, num_bytes: int, rows: RowsOfRank | None, traffic: GradientTraffic
    ) -> None:
        if rows is None:
            traffic.add_all_reduce(num_bytes, self._num_ranks)
        else:
            traffic.add_reduce_scatter(num_bytes, self._num_ranks)

    def attach_to_ddp(self, ddp: DistributedDataParallel) -> None:
        """From now on `ddp` reduces its buckets so."""
        if next(ddp.parameters()).is_cuda:
            reduce_buckets_on_own_stream(
                ddp, lambda bucket: self.post(bucket.parameters(), bucket.gradients())()
            )
            return
        posted = PostedBuckets(
            lambda bucket: self.post(bucket.parameters(), bucket.gradients(), bucket.buffer())
        )
        posted.attach_to_ddp(ddp)

    @torch.no_grad()
    def average_after_backward(
        self, parameters: Iterable[nn.Parameter], phases: PhaseTimer
    ) -> None:
        """Average the gradients of `parameters`, in fp32 at least, in one collective per type. One
        that a rank lacks is zero."""
        for dtype, tensors in group_by_averaging_dtype(parameters).items():
            averaged = []
            for parameter in tensors:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                averaged.append(parameter.grad.to(dtype))
            with phases("collective", REDUCE_SCATTER_GRADIENTS, axis="dp"):
                self.post(tensors, averaged)()
            for parameter, mean in zip(tensors, averaged, strict=True):
                if parameter.grad is not mean:
                    parameter.grad = mean.to(parameter.dtype)

    def post(
        self,
        parameters: Iterable[nn.Parameter],
        gradients: Iterable[torch.Tensor],
        bucket: torch.Tensor | None = None,
    ) -> End:
        """Begin to average `gradients` in place; what is returned waits for the end. `bucket`: the
        flat tensor that they are views of, if there is one."""
        cut: list[_CutGradient] = []
        whole_gradients: list[torch.Tensor] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            rows = self._find_rows(parameter)
            self._count_gradient(gradient.nbytes, rows, self._traffic)
            if rows is None:
                whole_gradients.append(gradient)
            else:
                cut.append((gradient, rows))
        if bucket is not None and self._is_quicker_whole(bucket, len(cut) + len(whole_gradients)):
            work = dist.all_reduce(bucket, op=dist.ReduceOp.AVG, group=self._group, async_op=True)
            return work.wait
        ends = [self._post_whole(whole_gradients)] if whole_gradients else []
        if cut:
            ends.append(self._post_own_rows(cut, bucket))

        def wait() -> None:
            for end in ends:
                end()

        return wait

    def _find_rows(self, parameter: nn.Parameter) -> RowsOfRank | None:
        return find_rows_of_rank(parameter, self._rank, self._num_ranks)

    def _is_quicker_whole(self, bucket: torch.Tensor, num_tensors: int) -> bool:
        """True for a bucket of small tensors, whose rows are many, in shared memory."""
        small_bytes = get_block_sizes().shared_rows_bytes * num_tensors
        return bucket.nbytes < small_bytes and find_transport_in_place(self._group) is not None

    def _post_own_rows(self, cut: Sequence[_CutGradient], bucket: torch.Tensor | None) -> End:
        transport = find_transport_in_place(self._group)
        if transport is not None and bucket is not None:
            own_rows = [rows.slice_tensor(gradient) for gradient, rows in cut]
            work = transport.reduce_rows_in_place(self._group, bucket, own_rows, "avg")
            return work.wait
        self._average_by_message(cut)
        return _do_nothing

    def _average_by_message(self, cut: Sequence[_CutGradient]) -> None:
        """Send gradients in one message, [ranks, rows of a rank], to those who update them."""
        matrices = [gradient.view(gradient.shape[rows.dim], -1) for gradient, rows in cut]
        # Divided first, as DDP does: a sum may overflow where the mean does not.
        message = cut_and_concatenate_chunks(matrices, self._num_ranks).div_(self._num_ranks)
        if is_on_cpu(message):
            mean = reduce_scatter_rows(message, self._group).view(-1)
        else:
            mean = torch.empty_like(message[0])
            dist.reduce_scatter_tensor(mean, message.view(-1), group=self._group)
        # Elements of each gradient in a row of the message, the last ranks' padding with them.
        sizes = [
            rows.chunk * matrix.shape[1] for (_, rows), matrix in zip(cut, matrices, strict=True)
        ]
        own_rows = [rows.slice_tensor(gradient).view(-1) for gradient, rows in cut]
        parts = [part[: len(row)] for row, part in zip(own_rows, mean.split(sizes), strict=True)]
        torch._foreach_copy_(own_rows, parts)

    def _post_whole(self, gradients: Sequence[torch.Tensor]) -> End:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat.div_(self._num_ranks)
        work = dist.all_reduce(flat, group=self._group, async_op=True)

        def write_means() -> None:
            work.wait()
            means = flat.split([gradient.numel() for gradient in gradients])
            for gradient, mean in zip(gradients, means, strict=True):
                gradient.copy_(mean.view(gradient.shape))

        return write_means


def _do_nothing() -> None:
    """The end of what has ended."""
