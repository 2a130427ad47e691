"""DDP's buckets in a dry run: its reducer cannot take an answer of a fake process group, nor cut
its buckets anew with fake tensors, so both are done here by the functions that it calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.parallel.data_parallel.bucket_bytes import choose_bucket_bytes
from phalanx.parallel.model import ParallelModel
from phalanx.verify.dry_run.collectives import ALL_REDUCE, CollectiveLog
from phalanx.verify.dry_run.moments import BACKWARD

CALLER = "phalanx/parallel/data_parallel/replicate.py (DDP's buckets)"


class DdpBucketReductions:
    """Stands for the all-reduces of DDP's buckets.

    DDP sets its buckets anew after the first backward, in the order in which gradients came: those
    are the ones that count.
    """

    def __init__(self, ddp: DistributedDataParallel, model: ParallelModel) -> None:
        self._group, self._compression = model.mesh.data_parallel_group(), model.compression
        self._traffic = model._context.traffic
        self._limit = choose_bucket_bytes(model.plan)
        self._arrived: list[nn.Parameter] = []
        ddp.register_comm_hook(None, _return_bucket_unreduced)
        ignored = ddp.parameters_to_ignore
        for name, parameter in ddp.module.named_parameters():
            if parameter.requires_grad and name not in ignored:
                parameter.register_post_accumulate_grad_hook(self._record_gradient_arrival)

    def _record_gradient_arrival(self, parameter: nn.Parameter) -> None:
        self._arrived.append(parameter)

    def reduce_buckets(self, log: CollectiveLog) -> None:
        """Reduce the gradients that came in the last backward: by the job's compression, or as the
        all-reduces of one step, which are added to `log`. It stands at the end of the backward,
        beside which DDP does it."""
        # Of several microbatches the last one reduces.
        last = list(dict.fromkeys(reversed(self._arrived)))[::-1]
        self._arrived.clear()
        for bucket in split_into_ddp_buckets(last, self._limit):
            if self._compression is not None:
                gradients = [p.grad for p in bucket if p.grad is not None]
                with self._traffic.counting_step_traffic():
                    self._compression.average_gradients_over_ranks(bucket, gradients)
                continue
            num_bytes = sum(parameter.nbytes for parameter in bucket)
            log.add(
                ALL_REDUCE,
                self._group,
                num_bytes,
                phase=BACKWARD,
                purpose="all_reduce gradients",
                caller=CALLER,
            )


def watch_ddp_buckets(model: ParallelModel) -> DdpBucketReductions | None:
    """The stand-in for a model under DDP, to which no hook was attached; None for another."""
    ddp = model._context.outer
    if not isinstance(ddp, DistributedDataParallel):
        return None
    return DdpBucketReductions(ddp, model)


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
