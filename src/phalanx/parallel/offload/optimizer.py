"""parallel.offload = "optimizer": what the optimizer updates, and its state, lies in host memory.

Gradients are copied down when the last backward has ended, weights up after the update. On a CPU
both are where they were, and nothing is copied. ("parameters" is FSDP's own: see dp_shard.)
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from phalanx.mesh.compat import dtensor_like
from phalanx.mesh.logical import local_tensor
from phalanx.parallel.optimizer_params import OptimizerShard
from phalanx.parallel.protocol import Order, ParallelContext
from phalanx.plan.plan import Plan


class OffloadOptimizer:
    order = Order.OPTIMIZER_OFFLOAD

    def wanted(self, plan: Plan) -> bool:
        return plan.parallel.offload == "optimizer"

    def apply(self, context: ParallelContext) -> None:
        context.materialize()
        for parameter in context.root.module.parameters():
            if not parameter.requires_grad:
                continue
            shards = context.optimizer_params.shards
            shard = shards.get(parameter, OptimizerShard(parameter, parameter))
            updated = shard.updated
            local = copy_to_host(local_tensor(updated.detach()))
            on_host = nn.Parameter(
                dtensor_like(updated, local) if isinstance(updated, DTensor) else local
            )
            shards[parameter] = OptimizerShard(parameter, on_host, shard.select, on_host=True)


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that a GPU reads fast; on a CPU the tensor itself."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


parallelism = OffloadOptimizer()
