"""DDP's buckets in a dry run: its reducer cannot take an answer of a fake process group, nor cut
its buckets anew with fake tensors, so both are done here by the functions that it calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.parallel.data_parallel.bucket_bytes import choose_bucket_bytes
from phalanx.parallel.data_parallel.own_rows import OwnRowsReduction, can_scatter_gradients
from phalanx.parallel.model import ParallelModel
from phalanx.verify.dry_run.collectives import ALL_REDUCE
from phalanx.verify.dry_run.moments import BACKWARD
from phalanx.verify.dry_run.tracker import StorageTracker

CALLER = "phalanx/parallel/data_parallel/replicate.py (DDP's buckets)"


class DdpBucketReductions:
    """Stands for what DDP does with its buckets.

    DDP sets its buckets anew after the first backward, in the order in which gradients came: those
    are the ones that count.
    """

    def __init__(
        self, ddp: DistributedDataParallel, model: ParallelModel, tracker: StorageTracker
    ) -> None:
        self._tracker = tracker
        self._group, self._compression = model.mesh.data_parallel_group(), model.compression
        self._own_rows: OwnRowsReduction | None = None
        trained = next((p for p in ddp.module.parameters() if p.requires_grad), None)
        if trained is not None and can_scatter_gradients(model.plan, self._group, trained):
            self._own_rows = OwnRowsReduction(self._group, model._context.traffic.gradients)
        self._limit = choose_bucket_bytes(model.plan)
        self._arrived: list[nn.Parameter] = []
        self._is_last_microbatch = False
        ddp.register_comm_hook(None, _return_bucket_unreduced)
        ignored = ddp.parameters_to_ignore
        for name, parameter in ddp.module.named_parameters():
            if parameter.requires_grad and name not in ignored:
                parameter.register_post_accumulate_grad_hook(self._arrived.append)
        hooks = model._context.hooks
        hooks.around_microbatch.append(self._begin_microbatch)
        hooks.after_backward.append(self._reduce_after_last_backward)

    @contextmanager
    def _begin_microbatch(self, is_last: bool) -> Iterator[None]:
        self._is_last_microbatch = is_last
        self._arrived.clear()
        yield

    def _reduce_after_last_backward(self) -> None:
        """Reduce gradients by the job's compression, to the ranks that update them, or by
        all-reduces. This stands at the end of the backward, beside which DDP does it."""
        if not self._is_last_microbatch:
            return
        for bucket in split_into_ddp_buckets(self._arrived, self._limit):
            gradients = [p.grad for p in bucket if p.grad is not None]
            if self._compression is not None:
                self._compression.average_gradients_over_ranks(bucket, gradients)
            elif self._own_rows is not None:
                self._own_rows.post(bucket, gradients)()
            else:
                self._log_all_reduce(sum(parameter.nbytes for parameter in bucket))

    def _log_all_reduce(self, num_bytes: int) -> None:
        if self._tracker.collectives is not None:
            self._tracker.collectives.add(
                ALL_REDUCE,
                self._group,
                num_bytes,
                phase=BACKWARD,
                purpose="all_reduce gradients",
                caller=CALLER,
            )


def stand_in_for_ddp_buckets(model: ParallelModel, tracker: StorageTracker) -> None:
    """Reduce the gradients of a model under DDP, to which no hook was attached."""
    ddp = model._context.outer
    if isinstance(ddp, DistributedDataParallel):
        DdpBucketReductions(ddp, model, tracker)


def split_into_ddp_buckets(
    parameters: Sequence[nn.Parameter], limit: int
) -> list[list[nn.Parameter]]:
    """DDP's buckets of at most `limit` bytes, for gradients in this order."""
    if not parameters:
        return []
    indices, _ = dist._compute_bucket_assignment_by_size(
        list(parameters), [limit], [], list(range(len(parameters)))
    )
    return [[parameters[index] for index in bucket] for bucket in indices]


# DDP looks up this argument by its name, `bucket`.
def _return_bucket_unreduced(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
