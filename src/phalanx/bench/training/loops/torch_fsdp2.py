"""torch's FSDP2 with a fused AdamW, written by hand: each block a unit, and the rest one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from phalanx.bench.training.loops.shared import (
    build_fused_adamw,
    build_module_with_loss,
    train_module_in_turns,
)
from phalanx.bench.training.payload import RankSetting
from phalanx.bench.training.rank import TrainingTurns


def train_in_turns(setting: RankSetting, turns: TrainingTurns) -> None:
    """Train under `fully_shard` over gloo, blocks resharded after their forward."""
    dist.init_process_group("gloo")
    module = build_module_with_loss(setting)
    mesh = init_device_mesh("cpu", (setting.num_ranks,))
    policy = MixedPrecisionPolicy()
    if setting.plan.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in list_blocks(module):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = build_fused_adamw(setting, module)

    @contextmanager
    def accumulate(is_last: bool) -> Iterator[None]:
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(is_last)
        yield

    # Its own policy casts.
    train_module_in_turns(setting, turns, module, optimizer, accumulate=accumulate, autocast=False)


def list_blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks of the model: the members of its module lists that are in no other."""
    blocks: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            blocks += child
        else:
            blocks += list_blocks(child)
    return blocks
