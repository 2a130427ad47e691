"""What an optimizer updates where that is not the module's own parameter: a slice of it, or a
copy on the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from phalanx.core.errors import LayoutError
from phalanx.mesh.compat import dtensor_like
from phalanx.mesh.logical import local_tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True, eq=False)
class OptimizerShard:
    """Stands for a part of `parameter` before an optimizer, as `trained`.

    `take` finds the part in the parameter's storage on this rank, and in that of its gradient.
    `on_host`: `trained` and its gradient are copies in host memory; else they are views.
    """

    parameter: nn.Parameter
    trained: nn.Parameter
    take: Callable[[torch.Tensor], torch.Tensor] = _whole
    on_host: bool = False

    def hand_over(self, host: torch.Tensor | None = None) -> torch.Tensor | None:
        """The gradient moves from the parameter to what stands for it.

        On the host it is copied into `host`, the one that was returned the last time, which the
        device does meanwhile: it is there once the device was waited for.
        """
        gradient, self.parameter.grad = self.parameter.grad, None
        if gradient is None:
            self.trained.grad = None
            return host
        piece = self.take(local_tensor(gradient))
        if self.on_host and piece.device.type != "cpu":
            if host is None or host.dtype is not piece.dtype or host.shape != piece.shape:
                host = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True)
            piece = host.copy_(piece, non_blocking=True)
        self.trained.grad = (
            dtensor_like(self.trained, piece) if isinstance(self.trained, DTensor) else piece
        )
        return host

    def bring_up(self) -> None:
        """What the optimizer wrote on the host, to where the model reads it."""
        here = self.take(local_tensor(self.parameter.detach()))
        there = local_tensor(self.trained.detach())
        if self.on_host and here.data_ptr() != there.data_ptr():
            here.copy_(there, non_blocking=True)

    def bring_down(self) -> None:
        """The other way: after weights were loaded into the model."""
        here = self.take(local_tensor(self.parameter.detach()))
        there = local_tensor(self.trained.detach())
        if self.on_host and here.data_ptr() != there.data_ptr():
            there.copy_(here)


@dataclass(eq=False)
class OptimizerParams:
    """The parts of a model by the parameter they stand for.

    Parameters without one are updated as they are.

    `before_update` are reductions of gradients that data parallelism leaves to us, `after_update`
    gathers what the ranks updated.
    """

    parts: dict[nn.Parameter, OptimizerShard] = field(default_factory=dict)
    before_update: list[Callable[[], None]] = field(default_factory=list)
    after_update: list[Callable[[], None]] = field(default_factory=list)
    _gradients: dict[OptimizerShard, torch.Tensor | None] = field(
        default_factory=dict
    )  # page-locked, of parts on the host
    _is_behind: bool = False

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """What an optimizer is to update for a parameter of the module."""
        part = self.parts.get(parameter)
        return parameter if part is None else part.trained

    def named(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, self.of(parameter)) for name, parameter in module.named_parameters())

    def named_parts(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that are not the module's own."""
        return (
            (name, self.parts[p].trained)
            for name, p in module.named_parameters()
            if p in self.parts
        )

    def hand_over(self) -> None:
        """After the last backward of a step."""
        for reduce in self.before_update:
            reduce()
        devices: set[torch.device] = set()
        for part in self.parts.values():
            if part.on_host and part.parameter.grad is not None:
                devices.add(local_tensor(part.parameter.grad).device)
            self._gradients[part] = part.hand_over(self._gradients.get(part))
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def require_parts(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises LayoutError for an optimizer of the module's own parameters, which no longer
        have the gradients."""
        own = {id(parameter) for parameter in self.parts}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise LayoutError(
                f"{type(optimizer).__name__} has the module's parameters, and in this layout parts"
                " of them are updated",
                fix="build it from model.parameters(), of what parallelize returned",
            )

    def publish(self) -> None:
        """After an optimizer's update: the model sees it, on every rank."""
        self._is_behind = False
        for part in self.parts.values():
            part.bring_up()
        for gather in self.after_update:
            gather()

    def refresh(self) -> None:
        """After weights were written into the model: copies on the host follow."""
        for part in self.parts.values():
            part.bring_down()

    def watch(self, others: Iterable[nn.Parameter] = ()) -> None:
        """Notice optimizers that update parts: their step alone does not reach the model.

        So it is of `others` where something else of the model moves with them.
        """
        mine = weakref.ref(self)
        trained = {id(self.of(parameter)) for parameter in (*self.parts, *others)}

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            watched = mine()
            if watched is not None and any(
                id(p) in trained for group in optimizer.param_groups for p in group["params"]
            ):
                watched._is_behind = True

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def require_published(self) -> None:
        """Raises LayoutError where an optimizer stepped and the model never saw it."""
        if self._is_behind:
            raise LayoutError(
                "an optimizer updated its part of the model, and the rest has not followed",
                why=(
                    "in this layout it has a part or a copy of each parameter, or biases of routers"
                    " move after it"
                ),
                fix="call model.update(optimizer) in place of optimizer.step()",
            )
