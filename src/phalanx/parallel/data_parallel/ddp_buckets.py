"""DDP's buckets of gradients, reduced by us: on a GPU on a stream of its own, on CPUs beside the
backward, and in memory that the ranks of a host share where they lie."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.core.block_sizes import get_block_sizes
from phalanx.mesh.shared_memory.opening import current_transport, shares_memory
from phalanx.parallel.traffic import GradientTraffic

# What people read of them.
ALL_REDUCE_GRADIENTS = "all_reduce gradients"


def reduce_buckets_on_own_stream(
    ddp: DistributedDataParallel, average: Callable[[Any], None]
) -> None:
    """From now on `ddp` reduces each of its buckets by `average`: on a GPU beside the backward, on
    CPUs within it."""
    stream = torch.cuda.Stream() if next(ddp.parameters()).is_cuda else None

    # DDP looks up this argument by its name, `bucket`.
    def average_bucket(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and knows no strings
        buffer = bucket.buffer()
        if stream is None:
            average(bucket)
            done: Any = torch.futures.Future()
            done.set_result(buffer)
            return done
        stream.wait_stream(torch.cuda.current_stream())
        # This runs beside the backward; DDP waits for the future before gradients are used.
        with torch.cuda.stream(stream):
            average(bucket)
            done = torch.futures.Future(devices=[buffer.device])
            done.set_result(buffer)
        return done

    ddp.register_comm_hook(None, average_bucket)


class PostedBuckets:
    """Reduces the buckets of a DDP model on CPUs, where other ranks see them if there is such
    memory.

    `post` begins to reduce a bucket in place when its gradients exist, and returns what waits for
    the end: this rank goes on with its backward and waits for all buckets at the last one.
    """

    def __init__(self, post: Callable[[Any], Callable[[], Any]]) -> None:
        self._post = post
        self._posted: list[
            tuple[Callable[[], Any], torch.futures.Future[torch.Tensor], torch.Tensor]
        ] = []
        # By index of the bucket, which torch makes anew after the first backward.
        self._published: dict[int, torch.Tensor] = {}

    def attach_to_ddp(self, ddp: DistributedDataParallel) -> None:
        # DDP looks up this argument by its name, `bucket`.
        def average_bucket_in_place(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and knows no strings
            return self._post_bucket(bucket)

        ddp.register_comm_hook(None, average_bucket_in_place)
        # Other ranks map the buckets, and would keep their memory.
        weakref.finalize(ddp, self._withdraw_all)

    def _post_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        self._publish(bucket.index(), buffer)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._posted.append((self._post(bucket), future, buffer))
        if bucket.is_last():
            posted, self._posted = self._posted, []
            for wait, each_future, each_buffer in posted:
                wait()
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


class WholeReduction:
    """Averages gradients over the ranks of `group`, all of each."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def count_bytes(self, parameters: Iterable[nn.Parameter], traffic: GradientTraffic) -> None:
        """Add to `traffic` what this rank sends for gradients of the type of `parameters`."""
        traffic.add_all_reduce(sum(p.nbytes for p in parameters), self._group.size())

    def attach_to_ddp(self, ddp: DistributedDataParallel) -> None:
        """Where ranks share memory `ddp` reduces its buckets there; elsewhere as it does."""
        if shares_memory(self._group):
            PostedBuckets(self._post).attach_to_ddp(ddp)

    def _post(self, bucket: Any) -> Callable[[], Any]:
        work = dist.all_reduce(
            bucket.buffer(), op=dist.ReduceOp.AVG, group=self._group, async_op=True
        )
        return work.wait
