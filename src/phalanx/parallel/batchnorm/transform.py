"""BatchNorm over the microbatch of all data-parallel ranks: what one process computes on their
concatenation.

Modules are not replaced: each becomes an instance of a class derived from its own, so that names,
types and hooks stay the user's, and a subclass that calls `super().forward` gets the statistics of
all ranks, too.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from phalanx.core.errors import LayoutError
from phalanx.parallel.batchnorm.layer import (
    AnyDimensionsBatchNorm,
    BatchStatisticsGroup,
    SynchronisedBatchNorm,
)
from phalanx.parallel.protocol import ParallelContext, TransformOrder
from phalanx.plan.plan import Plan

DERIVE_FROM_TORCH_BATCHNORM_FIX = (
    "derive it from nn.BatchNorm1d, 2d or 3d: phalanx synchronises those"
)


class SyncBatchNorm:
    order = TransformOrder.BATCHNORM

    def is_needed(self, plan: Plan) -> bool:
        """Also where nothing is synchronised but FSDP casts weights to bf16: torch's kernel
        takes no mixture."""
        layout, parallel = plan.layout.gradient_reduction_layout, plan.parallel
        casts = layout.dp_shard > 1 and parallel.zero_stage >= 2 and plan.precision != "fp32"
        return layout.data_parallel_size > 1 and (parallel.sync_batchnorm or casts)

    def apply(self, context: ParallelContext) -> None:
        norms = [
            item for item in context.root.module.named_modules() if isinstance(item[1], _BatchNorm)
        ]
        if not norms:
            return
        ranks = BatchStatisticsGroup(
            context.phases, context.plan.parallel.sync_batchnorm, context.mesh.data_parallel_group()
        )
        for name, module in norms:
            _make_batchnorm_synchronised(name, module, ranks)


def _make_batchnorm_synchronised(
    name: str, module: _BatchNorm, ranks: BatchStatisticsGroup
) -> None:
    """Change the class of `module` in place."""
    original = type(module)
    if isinstance(module, nn.SyncBatchNorm) and not ranks.all:
        return
    # torch's own class refuses CPUs, and DDP refuses anything derived from it.
    if isinstance(module, nn.SyncBatchNorm):
        if original is not nn.SyncBatchNorm:
            raise LayoutError(
                f"{name} ({original.__name__}) is derived from torch's SyncBatchNorm",
                fix=DERIVE_FROM_TORCH_BATCHNORM_FIX,
            )
        module.__class__ = AnyDimensionsBatchNorm
    else:
        module.__class__ = _derive_synchronised_batchnorm_class(original)  # type: ignore[arg-type]  # torch's are Any
    module._ranks = ranks
    # Only a forward of the user's own can leave out the one that is synchronised.
    if ranks.all and original.forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        module.register_forward_hook(
            functools.partial(_require_call_of_batchnorm_forward, name, original.__name__)
        )


@functools.cache
def _derive_synchronised_batchnorm_class(original: type[_BatchNorm]) -> type[_BatchNorm]:
    # In this order `super().forward` of a user's class finds ours before torch's.
    bases = (
        original,
        SynchronisedBatchNorm,
    )
    return type(f"Synchronised{original.__name__}", bases, {"__module__": original.__module__})


def _require_call_of_batchnorm_forward(
    name: str, class_name: str, module: nn.Module, args: Any, output: Any
) -> None:
    """A user's forward that never calls BatchNorm's would have used this rank's statistics
    alone."""
    assert isinstance(module, SynchronisedBatchNorm)
    if not module._was_called and module.training:
        raise LayoutError(
            f"{name} ({class_name}) computes its own statistics, which no rank knows of",
            why="its forward does not call super().forward",
            fix="let it, or set parallel.sync_batchnorm=false to normalise over each rank's share",
        )


parallelism = SyncBatchNorm()
