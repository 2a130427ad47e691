"""Builds the optimizer of a job's [optim], whose state exists at once: memory is known, and loading
is a copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from phalanx.core.errors import CheckpointError, LayoutError
from phalanx.core.registry import import_object_of_kind
from phalanx.job.learning_rate import RANDOM_WEIGHTS_LR
from phalanx.job.schema import Optim
from phalanx.mesh.logical import LogicalShard, full_name, get_local_tensor, make_logical_shard
from phalanx.optim.groups import build_weight_decay_groups

OPTIMIZERS_PACKAGE = "phalanx.optim.optimizers"
_LR_RATIO_KEY = "lr_ratio"


class Trainable(Protocol):
    """A module, or a ParallelModel around one."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...


def build_optimizer(model: Trainable, optim: Optim) -> torch.optim.Optimizer:
    """Build the optimizer `optim.kind` over the trainable parameters of `model`.

    An own one ("package.module:build") is called as `build(groups, optim)` and returns a torch
    optimizer. State that it wants in checkpoints must exist when it returns: restoring copies into
    it. `optim.lr` is a number then. Collective in a pipeline.
    """
    # By [optim] alone: whether weights begin at random is not known here.
    if optim.lr == "auto":
        optim = optim.model_copy(update={"lr": RANDOM_WEIGHTS_LR})
    # First, because it brings a sharded model to rest.
    named = list(model.named_parameters())
    module = getattr(model, "module", model)
    assert isinstance(module, nn.Module)
    is_staged = getattr(model, "is_staged", False)
    groups = replace(build_weight_decay_groups(module, named), keeps_empty=is_staged)
    if not (groups.decayed or groups.undecayed) and not is_staged:
        raise LayoutError(
            f"{type(module).__name__} has no parameter to train",
            fix="leave requires_grad of some on",
        )
    optimizer: Any = import_object_of_kind(optim.kind, OPTIMIZERS_PACKAGE, "build")(groups, optim)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise LayoutError(
            f"{optim.kind} returned {type(optimizer).__name__}, not a torch.optim.Optimizer"
        )
    # None is that of optimizers that can choose their own.
    rates = [group.get("lr") for group in optimizer.param_groups]
    ratios = [1.0 if rate is None else float(rate) / float(optim.lr) for rate in rates]
    all_ratios = set(ratios)
    # An own one makes groups of what its stage has: one alone may have another rate than those of
    # other stages. Those of this package have the job's.
    if is_staged and ":" in optim.kind:
        mesh: Any = getattr(model, "mesh", None)
        all_ratios.update(*mesh.gather_json(ratios))
    if len(all_ratios) > 1:
        _keep_ratios_of_rates(optimizer, ratios)
    return optimizer


def _keep_ratios_of_rates(optimizer: torch.optim.Optimizer, ratios: Iterable[float]) -> None:
    """Remember how many times the job's rate each group has, where groups differ in that."""
    for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
        group[_LR_RATIO_KEY] = ratio


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group of `optimizer` the job's rate of a step, or its own multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        if _LR_RATIO_KEY in group:
            group["lr"] *= group[_LR_RATIO_KEY]


def list_optimizer_shards(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    model_shards: Mapping[str, LogicalShard],
    *,
    rank: int,
    world_size: int,
    copies: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> dict[str, LogicalShard]:
    """The optimizer's state as logical shards named `optim/<parameter>/<slot>`; slots of the
    parameter's shape share its boxes.

    Slots of another shape (the update count) are the same on every rank that has the parameter:
    `rank` is this one's number among those of its pipeline stage, `world_size` how many they are,
    and `copies` says of parameters that several stages hold which of these this is, and how many
    they are. Raises CheckpointError for a slot that cannot be: rows of a parameter that tensor
    parallelism has cut.
    """
    shards: dict[str, LogicalShard] = {}
    for raw_name, parameter in named_parameters:
        name = full_name(raw_name)
        for slot, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                continue
            key = f"optim/{name}/{slot}"
            owner = model_shards[name]
            # Of the full tensor, or of the part that tensor parallelism left of it.
            if value.shape == parameter.shape:
                shards[key] = owner.like(key, get_local_tensor(value).detach())
            elif value.numel() > 1 and owner.global_shape != tuple(parameter.shape):
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {key} of shape {list(value.shape)} for what"
                    f" tp left of {name}",
                    why="nobody knows which part of the whole one's that is",
                    fix=(
                        "use an optimizer whose state has the shape of the parameter, or"
                        " parallel.tp=1"
                    ),
                )
            else:
                copy, num_copies = copies.get(name, (0, 1))
                shards[key] = make_logical_shard(
                    key,
                    value,
                    replica=copy * world_size + rank,
                    num_replicas=num_copies * world_size,
                )
    return shards
