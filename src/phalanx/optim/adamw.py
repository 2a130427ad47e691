"""AdamW with decoupled decay, fused, its state allocated at once so that memory is known and loading is a copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from phalanx.job.schema import Optim
from phalanx.mesh.logical import LogicalShard, full_name, local_tensor, shard_of

SLOTS = ("exp_avg", "exp_avg_sq")


def build_adamw(named_parameters: Iterable[tuple[str, nn.Parameter]], optim: Optim) -> torch.optim.AdamW:
    """Two groups: matrices decay; vectors (norms, biases) and embeddings do not."""
    decay, keep = [], []
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            (decay if parameter.ndim >= 2 and "embed" not in name else keep).append(parameter)
    groups = [{"params": decay, "weight_decay": optim.weight_decay}, {"params": keep, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{slot: torch.zeros_like(parameter, requires_grad=False) for slot in SLOTS},
            }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_shards(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    model_shards: Mapping[str, LogicalShard],
    *,
    rank: int,
    world_size: int,
) -> dict[str, LogicalShard]:
    """State as logical shards named `optim/<parameter>/<slot>`; slots of the parameter's shape share its boxes.

    Slots of another shape (the update count) are the same on every rank.
    """
    shards: dict[str, LogicalShard] = {}
    for raw_name, parameter in named_parameters:
        name = full_name(raw_name)
        for slot, value in optimizer.state.get(parameter, {}).items():
            key = f"optim/{name}/{slot}"
            owner = model_shards[name]
            if tuple(value.shape) == owner.global_shape:
                shards[key] = owner.like(key, local_tensor(value).detach())
            else:
                shards[key] = shard_of(key, value, replica=rank, num_replicas=world_size)
    return shards
