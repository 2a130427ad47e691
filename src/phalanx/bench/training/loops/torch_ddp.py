"""torch's DistributedDataParallel with a fused AdamW, written by hand."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from phalanx.bench.training.loops.shared import (
    build_fused_adamw,
    build_module_with_loss,
    train_module_in_turns,
)
from phalanx.bench.training.payload import RankSetting
from phalanx.bench.training.rank import TrainingTurns


def train_in_turns(setting: RankSetting, turns: TrainingTurns) -> None:
    """Train under DDP over gloo, whose gradients are views of its buckets."""
    dist.init_process_group("gloo")
    module = build_module_with_loss(setting)
    optimizer = build_fused_adamw(setting, module)
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)

    def accumulate(is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else wrapped.no_sync()

    train_module_in_turns(setting, turns, wrapped, optimizer, accumulate=accumulate)
