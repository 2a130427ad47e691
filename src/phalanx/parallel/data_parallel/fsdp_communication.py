"""What FSDP2 calls to gather a unit's parameters and to scatter its gradients.

On gloo both happen where they are called, and their time is charged to "collective" there. On a GPU
FSDP has streams of its own for them: what forward and backward wait for these is a part of their
seconds, and "collective" has only what the step itself waits for (its one reduction, tensor and
context parallelism).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from phalanx.mesh.compat import (
    adds_to_fsdp_gradients,
    get_fsdp_communication_classes,
    let_fsdp_gather_in_place,
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
    unit.set_custom_reduce_scatter(_Scatter(unit, context, shards))
    num_replicas = context.plan.layout.gradient_reduction_layout.dp_replicate
    if num_replicas > 1:
        # FSDP's all-reduce over copies of a shard goes through no seam, but is followed by this
        # call: also in a unit that nothing scatters, and only in the microbatches that reduce.
        traffic = context.traffic.gradients
        unit.set_all_reduce_hook(
            lambda gradients: traffic.add_all_reduce(gradients.nbytes, num_replicas)
        )


class _Gather(_FsdpGather):  # type: ignore[misc, valid-type]
    def __init__(self, context: ParallelContext, shards: UnchangedShards) -> None:
        super().__init__()
        self._phases, self._shards = context.phases, shards

    def post_in_place(self, parameters: list[Any], group: Any) -> Any:
        """Begin to fill a unit's parameters from where other ranks have their shards."""
        with self._phases.collective("all_gather parameters", axis="dp"):
            return self._shards.post_gather(parameters, group)

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
        self._is_averaged_over_copies = layout.dp_replicate > 1

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        message = None
        if device.type == "cpu":
            # One message is held at a time; who is late by less than a unit is here by now.
            self._shards.wait_for_reductions()
            message = self._messages.make_message(math.prod(size), dtype)
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
            and not self._is_averaged_over_copies
            and not adds_to_fsdp_gradients(self._unit, result.dtype)
        )
