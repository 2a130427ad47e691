"""The one place where transforms know of each other: their order, and what each is handed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import nn

from phalanx.core.phases import Phases
from phalanx.mesh.mesh import Mesh
from phalanx.plan.planner import Plan


class Order(IntEnum):
    """Transforms are applied in this order, whatever the layout."""

    SPLIT = 1  # pipeline stages
    SHARD = 2  # tensor and expert parallelism
    STATISTICS = 3  # layers that must see what all ranks see
    RECOMPUTE = 4
    COMPILE = 5
    DATA = 6  # data parallelism wraps what is left


class Root(nn.Module):
    """What data parallelism wraps: the user's module, with the objective inside one forward call.

    Being one call matters: FSDP keeps the root's parameters (the head among them) whole until it returns, and DDP
    arms its gradient hooks on it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], then: Callable[[Any], Any] | None) -> Any:
        outputs = self.module(*args, **kwargs)
        return outputs if then is None else then(outputs)


@dataclass(kw_only=True)
class Workpiece:
    """A model under construction: transforms read the plan and the mesh and change or wrap `root`."""

    root: Root
    plan: Plan
    mesh: Mesh
    phases: Phases
    blocks: list[nn.Module]
    outer: nn.Module  # what is called; `root`, or a wrapper around it
    sync: Callable[[bool], AbstractContextManager[None]] = lambda on: nullcontext()
    after_backward: Callable[[], None] = lambda: None
    autocast: bool = True  # False where a transform itself casts parameters and inputs
    materialize: Callable[[], None] = lambda: None
    rest: Callable[[], None] = lambda: None  # gives weights back that a forward without a backward left gathered

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.plan.precision == "bf16" else torch.float32


class Parallelism(Protocol):
    """One axis or transform: `order` places it, `wanted` reads the plan, `apply` changes the workpiece.

    Implementations are the modules of this folder that define `parallelism`; the contract tests cover each.
    """

    order: Order

    def wanted(self, plan: Plan) -> bool: ...

    def apply(self, piece: Workpiece) -> None: ...
