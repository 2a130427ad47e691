"""parallel.offload = "optimizer": what the optimizer updates, and its state, lies in host memory.

Gradients are copied down when the last backward has ended, weights up after the update. On a CPU
both are where they were, and nothing is copied. ("parameters" is FSDP's own: see dp_shard.)
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from phalanx.mesh.compat import wrap_local_with_same_placements
from phalanx.mesh.logical import get_local_tensor
from phalanx.parallel.optimizer_params import OptimizerParameterSubstitute
from phalanx.parallel.protocol import ParallelContext, TransformOrder
from phalanx.plan.plan import Plan


class OffloadOptimizerState:
    order = TransformOrder.OPTIMIZER_OFFLOAD

    def is_needed(self, plan: Plan) -> bool:
        return plan.parallel.offload == "optimizer"

    def apply(self, context: ParallelContext) -> None:
        # After all who move weights: on a CPU the optimizer updates them where they lie then.
        context.when_materialized.append(functools.partial(self._offload, context))

    def _offload(self, context: ParallelContext) -> None:
        for parameter in context.root.module.parameters():
            if not parameter.requires_grad:
                continue
            shards = context.optimizer_params.shards
            shard = shards.get(parameter, OptimizerParameterSubstitute(parameter, parameter))
            updated = shard.updated
            local = copy_to_pinned_host_memory(get_local_tensor(updated.detach()))
            on_host = nn.Parameter(
                wrap_local_with_same_placements(updated, local)
                if isinstance(updated, DTensor)
                else local
            )
            shards[parameter] = OptimizerParameterSubstitute(
                parameter, on_host, shard.select, on_host=True
            )


def copy_to_pinned_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that a GPU reads fast; on a CPU the tensor itself."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


parallelism = OffloadOptimizerState()
