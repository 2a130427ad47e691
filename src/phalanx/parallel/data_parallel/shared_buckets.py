"""DDP's buckets in memory that the ranks of a host share: gradients are averaged where they lie."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from phalanx.core.block_sizes import get_block_sizes
from phalanx.mesh.shared_memory.opening import current_transport


class SharedBucketReduction:
    """Averages the buckets of a DDP model over `group`, whose ranks share memory.

    A bucket is posted when its gradients exist; this rank goes on with its backward and waits for
    all of them at the last one.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._posted: list[tuple[Any, torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        # By index of the bucket, which torch makes anew after the first backward.
        self._published: dict[int, torch.Tensor] = {}

    def attach_to_ddp(self, ddp: DistributedDataParallel) -> None:
        # DDP looks up this argument by its name, `bucket`.
        def average_bucket_in_place(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and knows no strings
            return self._post(bucket.index(), bucket.buffer(), bucket.is_last())

        ddp.register_comm_hook(None, average_bucket_in_place)
        # Other ranks map the buckets, and would keep their memory.
        weakref.finalize(ddp, self._withdraw_all)

    def _post(
        self, index: int, buffer: torch.Tensor, is_last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        self._publish(index, buffer)
        work = dist.all_reduce(buffer, op=dist.ReduceOp.AVG, group=self._group, async_op=True)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._posted.append((work, future, buffer))
        if is_last:
            posted, self._posted = self._posted, []
            for each_work, each_future, each_buffer in posted:
                each_work.wait()
                each_future.set_result(each_buffer)
        return future

    def _withdraw_all(self) -> None:
        transport = current_transport()
        for buffer in self._published.values():
            if transport is not None:
                transport.withdraw(buffer)
        self._published.clear()

    def _publish(self, index: int, buffer: torch.Tensor) -> None:
        before = self._published.get(index)
        is_same = before is not None and before.data_ptr() == buffer.data_ptr()
        transport = current_transport()
        is_small = buffer.nbytes < get_block_sizes().shared_bucket_bytes
        if is_same or is_small or transport is None:
            return
        if before is not None:
            transport.withdraw(before)
            del self._published[index]
        if transport.publish(buffer):
            self._published[index] = buffer
