"""What FSDP2 calls to gather a unit's parameters and to scatter its gradients.

On CPUs all of it happens where it is called or waited for, and this time is charged to
"collective": gathers, reduce-scatters, and the all-reduce over copies of a shard (HSDP). On a GPU
FSDP has streams of its own for them: what forward and backward wait for these is a part of their
seconds, and "collective" has only what the step itself waits for (its one reduction, tensor and
context parallelism).
"""

from __future__ import annotations

import datetime
import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from phalanx.core.phases import PhaseTimer
from phalanx.mesh.compat import (
    adds_to_fsdp_gradients,
    get_fsdp_communication_classes,
    let_fsdp_gather_in_place,
    reduces_over_fsdp_copies,
)
from phalanx.mesh.devices import is_on_cpu
from phalanx.mesh.gloo_collectives import all_gather_rows_in_place, reduce_scatter_rows
from phalanx.mesh.logical import share_first_element
from phalanx.parallel.data_parallel.shared_shards import ScatteredMessages, UnchangedShards
from phalanx.parallel.protocol import ParallelContext

_FsdpGather, _FsdpScatter = get_fsdp_communication_classes()


def set_fsdp_communication(
    unit: FSDPModule, context: ParallelContext, shards: UnchangedShards
) -> None:
    """Have a unit gather and scatter by what is quickest between these ranks, with time and traffic
    charged."""
    let_fsdp_gather_in_place()
    unit.set_custom_all_gather(_Gather(context, shards))
    scatter = _Scatter(unit, context, shards)
    unit.set_custom_reduce_scatter(scatter)
    if scatter.num_replicas > 1:
        # FSDP's all-reduce over copies of a shard goes through no seam, but is followed by this
        # call: also in a unit that nothing scatters, and only in the microbatches that reduce.
        unit.set_all_reduce_hook(scatter.end_all_reduce)


class _TimedGather(dist.Work):
    """The Work of a gather whose wait is charged to "collective"."""

    def __init__(self, work: dist.Work, phases: PhaseTimer) -> None:
        super().__init__()
        self._work, self._phases = work, phases

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        with self._phases.collective("all_gather parameters", axis="dp"):
            return bool(self._work.wait() if timeout is None else self._work.wait(timeout))


class _Gather(_FsdpGather):  # type: ignore[misc, valid-type]
    def __init__(self, context: ParallelContext, shards: UnchangedShards) -> None:
        super().__init__()
        self._phases, self._shards = context.phases, shards

    def post_in_place(self, parameters: list[Any], group: Any) -> Any:
        """Begin to fill a unit's parameters from where other ranks have their shards."""
        with self._phases.collective("all_gather parameters", axis="dp"):
            work = self._shards.post_gather(parameters, group)
        return None if work is None else _TimedGather(work, self._phases)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> Any:
        with self._phases.collective("all_gather parameters", axis="dp"):
            if async_op or not is_on_cpu(output_tensor):
                return super().__call__(output_tensor, input_tensor, group, async_op)
            rows = output_tensor.view(group.size(), -1)
            rank_rows = rows[group.rank()]
            # FSDP fills its part of the output.
            if not share_first_element(rank_rows, input_tensor):
                rank_rows.copy_(input_tensor.view(-1))
            all_gather_rows_in_place(rows, group)
            return None


class _Scatter(_FsdpScatter):  # type: ignore[misc, valid-type]
    def __init__(self, unit: FSDPModule, context: ParallelContext, shards: UnchangedShards) -> None:
        super().__init__()
        self._unit, self._phases, self._shards = unit, context.phases, shards
        self._traffic = context.traffic.gradients
        self._messages = ScatteredMessages(shards)
        layout = context.plan.layout.gradient_reduction_layout
        self.num_replicas = layout.dp_replicate
        # FSDP asks for the memory of the message, and then for that of its result.
        self._message_size: int | None = None
        self._is_all_reducing = False

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        message = None
        if device.type == "cpu":
            # One message is held at a time; who is late by less than a unit is here by now.
            self._shards.wait_for_reductions()
            message = self._messages.make_message(math.prod(size), dtype)
        if self._message_size is None:
            self._message_size = math.prod(size)
        else:
            # As long as the message: one rank has all of it, and nothing is scattered.
            if self._message_size == math.prod(size):
                self._begin_all_reduce()
            self._message_size = None
        if message is not None:
            return message.view(size)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        # The unit's own group: experts are scattered over fewer ranks than the rest.
        self._traffic.add_reduce_scatter(input_tensor.nbytes, group.size())
        self._message_size = None
        work = self._reduce_scatter(output_tensor, input_tensor, group, op, async_op)
        self._begin_all_reduce()
        return work

    def _begin_all_reduce(self) -> None:
        """Where FSDP is about to average the scattered gradients over the copies of a shard: the
        time until `end_all_reduce` is waiting and transfer."""
        if self.num_replicas > 1 and reduces_over_fsdp_copies(self._unit):
            self._is_all_reducing = True
            self._phases.enter_collective("all_reduce gradients", axis="dp")

    def end_all_reduce(self, gradients: torch.Tensor) -> None:
        """FSDP's hook behind the all-reduce over copies."""
        self._traffic.add_all_reduce(gradients.nbytes, self.num_replicas)
        if self._is_all_reducing:
            self._is_all_reducing = False
            self._phases.leave_collective()

    def _reduce_scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool,
    ) -> Any:
        with self._phases.collective("reduce_scatter gradients", axis="dp"):
            is_plain = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
            if async_op or not is_plain or not is_on_cpu(output_tensor):
                return super().__call__(output_tensor, input_tensor, group, op, async_op)
            may_end_later = self._leaves_result_as_it_is(output_tensor, op)
            if self._messages.reduce_scatter(
                output_tensor, input_tensor, group, op, may_end_later=may_end_later
            ):
                return None
            total = reduce_scatter_rows(input_tensor.view(group.size(), -1), group).view_as(
                output_tensor
            )
            torch.div(total, group.size() if op == dist.ReduceOp.AVG else 1, out=output_tensor)
            return None

    def _leaves_result_as_it_is(self, result: torch.Tensor, op: Any) -> bool:
        """True if FSDP makes gradients that are views of the result, and computes nothing of it."""
        return (
            op == dist.ReduceOp.AVG
            and self.num_replicas == 1
            and not adds_to_fsdp_gradients(self._unit, result.dtype)
        )
