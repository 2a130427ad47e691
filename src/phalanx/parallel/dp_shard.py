"""dp_shard: parameters, gradients and optimizer state are split over ranks (FSDP2); with dp_replicate, HSDP.

Each block is one unit: gathered before use, freed after (zero_stage 3) or kept until the backward (zero_stage 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from phalanx.core.errors import LayoutError
from phalanx.core.phases import Phases
from phalanx.mesh.compat import fsdp_comm_classes, reduce_unused_parameters
from phalanx.mesh.logical import full_name
from phalanx.parallel.batchnorm import differing_buffers
from phalanx.parallel.protocol import Order, Workpiece
from phalanx.plan.planner import Plan


class DpShard:
    order = Order.DATA

    def wanted(self, plan: Plan) -> bool:
        return plan.layout.dp_shard > 1

    def apply(self, piece: Workpiece) -> None:
        layout = piece.plan.layout
        axes = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)
        low = piece.compute_dtype is not torch.float32
        _refuse_scalars(piece.root.module)
        blocks = _self_contained(piece)
        # A model may say that its blocks get activations in the compute type already: casting what is left would only
        # round what must stay wide (rotary tables). Other modules keep autocast as well, as under DDP.
        cast = not getattr(piece.root.module, "block_inputs_are_cast", False)
        mesh = piece.mesh.submesh(*axes)
        free = piece.plan.zero_stage == 3
        for block in blocks:
            policy = _policy(piece.compute_dtype, low, cast_inputs=cast)
            fully_shard(block, mesh=mesh, reshard_after_forward=free, mp_policy=policy)
        # The root holds embedding and head, which the backward needs at once: freeing them would gather them twice.
        policy = _policy(piece.compute_dtype, low, cast_inputs=True)
        fully_shard(piece.root, mesh=mesh, reshard_after_forward=free and not blocks, mp_policy=policy)
        piece.autocast = cast
        units = [module for module in piece.root.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            _time_communication(unit, piece.phases)
            reduce_unused_parameters(unit)
        root, buffers = piece.root, differing_buffers(piece.root)

        @contextmanager
        def sync(on: bool) -> Iterator[None]:
            root.set_requires_gradient_sync(on)
            root.set_is_last_backward(on)
            for buffer in buffers:  # as DDP does: every forward begins with rank 0's running statistics
                dist.broadcast(buffer, 0)
            yield

        def rest() -> None:
            for unit in units:
                unit.reshard()

        piece.sync, piece.rest = sync, rest


def _refuse_scalars(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.ndim == 0:
            raise LayoutError(
                f"parameter {full_name(name)} is a scalar, which cannot be split over dp_shard",
                fix="give it the shape (1,), or set parallel.dp_shard=1",
            )


def _self_contained(piece: Workpiece) -> list[nn.Module]:
    """The blocks that share no parameter with anything outside; the others stay in the root's unit.

    A unit gathers and frees its parameters alone, so a parameter can belong to one unit only.
    """
    uses = Counter(p for _, p in piece.root.named_parameters(remove_duplicate=False))
    own = [Counter(p for _, p in block.named_parameters(remove_duplicate=False)) for block in piece.blocks]
    return [block for block, counts in zip(piece.blocks, own, strict=True) if all(uses[p] == counts[p] for p in counts)]


def _policy(compute: torch.dtype, low: bool, *, cast_inputs: bool) -> MixedPrecisionPolicy:
    if not low:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=cast_inputs)


def _time_communication(unit: FSDPModule, phases: Phases) -> None:
    """Charge FSDP's gathers and scatters to "collective" where they block; on gloo that is where they happen."""
    gather_class, scatter_class = fsdp_comm_classes()

    class TimedGather(gather_class):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with phases("collective", "all_gather parameters"):
                return super().__call__(*args, **kwargs)

    class TimedScatter(scatter_class):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with phases("collective", "reduce_scatter gradients"):
                return super().__call__(*args, **kwargs)

    unit.set_custom_all_gather(TimedGather())
    unit.set_custom_reduce_scatter(TimedScatter())


parallelism = DpShard()
