"""Parameters that FSDP leaves whole (parallel.keep_whole_below, and single numbers): reduced
together, once per step.

A gather for a few numbers costs as much time as one for many. Every rank holds and updates all of
these alike.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from phalanx.core.phases import PhaseTimer
from phalanx.mesh.compat import wrap_local_as_dtensor
from phalanx.parallel.optimizer_params import OptimizerParameterSubstitute
from phalanx.parallel.protocol import ParallelContext, TransformOrder
from phalanx.plan.plan import Plan


def find_parameters_left_unsharded(module: nn.Module, below: int) -> set[nn.Parameter]:
    """Parameters that FSDP leaves unsharded: small ones, single numbers, and tensors that do not
    lie in the order of their dimensions, which it cannot split."""
    return {
        p for p in module.parameters() if p.ndim == 0 or p.numel() < below or not p.is_contiguous()
    }


class AverageUnshardedParams:
    order = TransformOrder.UNSHARDED_PARAMS

    def is_needed(self, plan: Plan) -> bool:
        return plan.layout.gradient_reduction_layout.dp_shard > 1 and plan.parallel.zero_stage >= 2

    def apply(self, context: ParallelContext) -> None:
        context.materialize()
        unsharded = []
        for parameter in context.root.module.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                unsharded.append(parameter)
        if not unsharded:
            return
        axes = context.fsdp_mesh_axes
        mesh = context.mesh.submesh(*axes)
        for parameter in unsharded:
            # An optimizer's fused kernel takes DTensors or plain tensors, not both.
            local = wrap_local_as_dtensor(
                parameter.detach(), mesh, (Replicate(),) * len(axes), parameter
            )
            # Every rank updates it alike, so nothing has to be gathered afterwards.
            shard = OptimizerParameterSubstitute(parameter, nn.Parameter(local))
            context.optimizer_params.shards[parameter] = shard
        group, phases = context.mesh.data_parallel_group(), context.phases
        num_bytes = sum(p.numel() * choose_averaging_dtype(p).itemsize for p in unsharded)
        context.optimizer_params.before_update.append(
            lambda: context.missing_gradients.note_before_reduction(unsharded)
        )
        context.optimizer_params.before_update.append(
            lambda: context.traffic.gradients.add_all_reduce(num_bytes, group.size())
        )
        context.optimizer_params.before_update.append(
            lambda: average_gradients_in_one_collective(unsharded, group, phases)
        )


def choose_averaging_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The type that gradients are averaged in: fp32 at least."""
    return torch.promote_types(parameter.dtype, torch.float32)


def group_by_averaging_dtype(
    parameters: Iterable[nn.Parameter],
) -> dict[torch.dtype, list[nn.Parameter]]:
    """The parameters by the type that their gradients are averaged in, each in its order."""
    by_type: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_type.setdefault(choose_averaging_dtype(parameter), []).append(parameter)
    return by_type


@torch.no_grad()
def average_gradients_in_one_collective(
    parameters: list[nn.Parameter], group: dist.ProcessGroup, phases: PhaseTimer
) -> None:
    """The mean over the ranks, in fp32 at least, in one collective per type.

    A gradient that a rank lacks is zero.
    """
    for dtype, tensors in group_by_averaging_dtype(parameters).items():
        gradients = []
        for parameter in tensors:
            # Zeros, for all ranks must add up tensors of one length.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(gradient.flatten().to(dtype))
        flat = torch.cat(gradients)
        with phases("collective", "all_reduce gradients of whole parameters", axis="dp"):
            dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for parameter, mean in zip(tensors, flat.split([p.numel() for p in tensors]), strict=True):
            # In the parameter's own order: fused optimizers walk both alike.
            parameter.grad = torch.empty_like(parameter).copy_(mean.view_as(parameter))


parallelism = AverageUnshardedParams()
