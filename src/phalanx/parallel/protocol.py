"""The one place where transforms know of each other: their order, and what each is handed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import nn

from phalanx.core.phases import PhaseTimer
from phalanx.mesh.logical import (
    LogicalShard,
    ReplicaPosition,
    TensorParallelCut,
    collect_module_shards,
)
from phalanx.mesh.mesh import Mesh
from phalanx.parallel.axes import ObjectsByAxisType
from phalanx.parallel.dropout.rng import DropoutRng
from phalanx.parallel.loss_scale import LossNormalizer, build_loss_normalizer
from phalanx.parallel.missing_gradients import MissingGradients
from phalanx.parallel.optimizer_params import OptimizerParameterMap
from phalanx.parallel.step_hooks import StepHooks
from phalanx.parallel.traffic import StepTraffic
from phalanx.plan.plan import Plan


class TransformOrder(IntEnum):
    """Order in which transforms are applied, whatever the layout; each transform has its own."""

    PIPELINE = 1  # the others see the blocks of this rank's stages only
    CONTEXT = 2
    TENSOR = 3
    EXPERTS = 4  # after TENSOR: what it left of the experts' matrices is split once more
    BATCHNORM = 5
    DROPOUT = 6
    FP8 = 7
    ACTIVATION_OFFLOAD = 8
    RECOMPUTE = 9
    COMPILE = 10  # after RECOMPUTE: the compiled forward is the one that recomputes
    REPLICATE = 11  # data parallelism wraps the changed blocks
    SHARD = 12
    GRADIENT_TREE = 13  # in place of both
    TIED_PARAMS = 14  # from here on: what the optimizer updates, which data parallelism decides
    UNSHARDED_PARAMS = 15
    ZERO1 = 16
    OPTIMIZER_OFFLOAD = 17  # last: the other transforms decide what it copies to the host


class ModuleWithObjective(nn.Module):
    """The module that data parallelism wraps: the user's, with the objective inside one forward
    call.

    Being one call matters: FSDP keeps the root's parameters (the head among them) whole until it
    returns, and DDP arms its gradient hooks on it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # Held as it is, so that names inside stay the user's.
        self.module = module

    def forward(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], then: Callable[[Any], Any] | None
    ) -> Any:
        outputs = self.module(*args, **kwargs)
        if then is None:
            return outputs
        return then(outputs)


@dataclass(kw_only=True)
class ParallelContext:
    """A model under construction: transforms read the plan and the mesh and change or wrap
    `root`, append to `hooks`, and add what they keep to `axes`."""

    root: ModuleWithObjective
    plan: Plan
    mesh: Mesh
    phases: PhaseTimer
    blocks: list[nn.Module]
    outer: nn.Module  # what is called; `root`, or DDP's wrapper around it
    names: frozenset[str] = frozenset()  # of all modules of the whole model
    block_of: Mapping[str, str] = field(default_factory=dict)
    """By full name of each parameter of the whole model, the block that it is in."""
    autocast: bool = True  # False where the casts of FSDP are enough
    materialize: Callable[[], None] = lambda: None
    when_materialized: list[Callable[[], None]] = field(default_factory=list)
    """Called once, when all weights are there and before anybody keeps a view of one."""
    # What one axis knows is an object of its own in `axes`, so a new axis needs no field here. What
    # every layout has (dropout's numbers, the optimizer's parameters) is a field, so that no reader
    # asks whether it is there. So are `cuts` and `copies`: results that `position` reads whatever
    # the axis, and that are empty without one. tp writes `cuts`, and ep cuts once more what tp
    # left; pp writes `copies`.
    hooks: StepHooks = field(default_factory=StepHooks)
    axes: ObjectsByAxisType = field(default_factory=ObjectsByAxisType)
    traffic: StepTraffic = field(default_factory=StepTraffic)
    dropout_rng: DropoutRng = field(default_factory=lambda: DropoutRng(seed=0))
    optimizer_params: OptimizerParameterMap = field(default_factory=OptimizerParameterMap)
    missing_gradients: MissingGradients = field(default_factory=MissingGradients)
    cuts: dict[str, TensorParallelCut] = field(default_factory=dict)
    """By full name: which blocks of a parameter this rank has, of those that tp or ep has cut."""
    copies: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By full name: (which of the ranks this is, how many they are) of parameters that several
    ranks of a pipeline hold."""
    normalizer: LossNormalizer = field(init=False)

    def __post_init__(self) -> None:
        self.normalizer = build_loss_normalizer(self.plan)

    def shards(self) -> tuple[dict[str, LogicalShard], dict[str, str]]:
        """Shards of parameters and persistent buffers as they are now, by full-model name;
        aliases of tied tensors."""
        return collect_module_shards(self.root.module, self.find_replica_position)

    @property
    def find_replica_position(self) -> ReplicaPosition:
        """Position of this rank among those that hold the same."""
        mesh, layout = self.mesh, self.plan.layout
        # pp is the outermost axis: the ranks of one stage are numbered one after another.
        num_ranks = layout.world_size // layout.pp
        return ReplicaPosition(
            mesh.rank % num_ranks,
            num_ranks,
            self.cuts,
            mesh.coordinates["tp"],
            layout.tp,
            self.copies,
        )

    @property
    def fsdp_mesh_axes(self) -> tuple[str, ...]:
        """Axes of the mesh for data parallelism that shards: with copies of shards, their axis
        comes first."""
        if self.plan.layout.dp_replicate > 1:
            return "dp_replicate", "dp_shard"
        return ("dp_shard",)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of activations, and of what is not computed in fp8."""
        low = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
        return low.get(self.plan.precision, torch.float32)


class ModuleTransform(Protocol):
    """One axis or transform: `order` places it, `is_needed` reads the plan, `apply` changes the
    model.

    Implementations are the modules of the folders here that define `parallelism`; the contract
    tests cover each.
    """

    order: TransformOrder

    def is_needed(self, plan: Plan) -> bool: ...

    def apply(self, context: ParallelContext) -> None: ...
