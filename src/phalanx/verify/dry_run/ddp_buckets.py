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
        self._group = model.mesh.data_parallel_group()
        self._limit = choose_bucket_bytes(model.plan)
        self._arrived: list[nn.Parameter] = []
        ddp.register_comm_hook(None, _return_bucket_unreduced)
        ignored = ddp.parameters_to_ignore
        for name, parameter in ddp.module.named_parameters():
            if parameter.requires_grad and name not in ignored:
                parameter.register_post_accumulate_grad_hook(self._record_gradient_arrival)

    def _record_gradient_arrival(self, parameter: nn.Parameter) -> None:
        self._arrived.append(parameter)

    def record_bucket_reductions(self, log: CollectiveLog) -> None:
        """Add the all-reduces of one step, of the gradients that came in the last backward."""
        # Of several microbatches the last one reduces.
        last = list(dict.fromkeys(reversed(self._arrived)))[::-1]
        self._arrived.clear()
        for num_bytes in list_ddp_bucket_bytes(last, self._limit):
            log.add(
                ALL_REDUCE,
                self._group,
                num_bytes,
                phase=BACKWARD,
                purpose="all_reduce gradients",
                caller=CALLER,
            )


def watch_ddp_buckets(model: ParallelModel) -> DdpBucketReductions | None:
    """The stand-in for a model under DDP; None for another, and where a hook of ours compresses."""
    ddp = model._context.outer
    if not isinstance(ddp, DistributedDataParallel) or model.compression is not None:
        return None
    return DdpBucketReductions(ddp, model)


def list_ddp_bucket_bytes(parameters: Sequence[torch.Tensor], limit: int) -> list[int]:
    """Bytes of DDP's buckets of at most `limit` bytes, for gradients in this order."""
    if not parameters:
        return []
    indices, _ = dist._compute_bucket_assignment_by_size(
        list(parameters), [limit], [], list(range(len(parameters)))
    )
    return [sum(parameters[index].nbytes for index in bucket) for bucket in indices]


# DDP looks up this argument by its name, `bucket`.
def _return_bucket_unreduced(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
