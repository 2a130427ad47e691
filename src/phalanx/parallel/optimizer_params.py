"""What an optimizer updates where that is not the module's own parameter: a slice of it, or a
copy on the host.

Rows of it under ZeRO-1, a copy under offload. Such a part is a DTensor or tensor of its own, so
that optimizers, their state in checkpoints and the norm need to know of no layout;
`ParallelModel.update` brings it back to the model.
"""

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
from phalanx.mesh.compat import wrap_local_with_same_placements
from phalanx.mesh.logical import get_local_tensor


def _select_full_parameter(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# Compared by identity (eq=False): it is a key of dictionaries, and tensors compare element by
# element.
@dataclass(frozen=True, eq=False)
class OptimizerParameterSubstitute:
    """Stands for a part of `parameter` before an optimizer, as `updated`.

    `select` finds the part in the parameter's storage on this rank, and in that of its gradient.
    `on_host`: `updated` and its gradient are copies in host memory; else they are views.
    """

    parameter: nn.Parameter
    updated: nn.Parameter
    select: Callable[[torch.Tensor], torch.Tensor] = _select_full_parameter
    on_host: bool = False

    def move_gradients_to_optimizer(self, host: torch.Tensor | None = None) -> torch.Tensor | None:
        """The gradient moves from the parameter to what stands for it.

        On the host it is copied into `host`, the one that was returned the last time, which the
        device does meanwhile: it is there once the device was waited for.
        """
        # Taken away from the parameter: the optimizer's zero_grad does not know it, and the next
        # step would add to it.
        gradient, self.parameter.grad = self.parameter.grad, None
        if gradient is None:
            self.updated.grad = None
            return host
        gradient_shard = self.select(get_local_tensor(gradient))
        if self.on_host and gradient_shard.device.type != "cpu":
            if (
                # Page-locked memory is slow to get: the buffer of the last step is used again.
                host is None
                or host.dtype is not gradient_shard.dtype
                or host.shape != gradient_shard.shape
            ):
                host = torch.empty(
                    gradient_shard.shape, dtype=gradient_shard.dtype, pin_memory=True
                )
            gradient_shard = host.copy_(gradient_shard, non_blocking=True)
        if isinstance(self.updated, DTensor):
            self.updated.grad = wrap_local_with_same_placements(self.updated, gradient_shard)
        else:
            self.updated.grad = gradient_shard
        return host

    def copy_updated_values_to_model(self) -> None:
        """Copy what the optimizer wrote on the host to where the model reads it."""
        if not self.on_host:
            return
        in_model = self.select(get_local_tensor(self.parameter.detach()))
        in_optimizer = get_local_tensor(self.updated.detach())
        if in_model.data_ptr() != in_optimizer.data_ptr():
            in_model.copy_(in_optimizer, non_blocking=True)

    def copy_model_values_to_host(self) -> None:
        """The other way: after weights were loaded into the model."""
        in_model = self.select(get_local_tensor(self.parameter.detach()))
        in_optimizer = get_local_tensor(self.updated.detach())
        if self.on_host and in_model.data_ptr() != in_optimizer.data_ptr():
            in_optimizer.copy_(in_model)


@dataclass(eq=False)
class OptimizerParameterMap:
    """The parts of a model by the parameter they stand for.

    Parameters without one are updated as they are.

    `before_update` are reductions of gradients that data parallelism leaves to us, `after_update`
    gathers what the ranks updated.
    """

    shards: dict[nn.Parameter, OptimizerParameterSubstitute] = field(default_factory=dict)
    before_update: list[Callable[[], None]] = field(default_factory=list)
    after_update: list[Callable[[], None]] = field(default_factory=list)
    # Page-locked gradients of parts on the host, used again in each step.
    _gradients: dict[OptimizerParameterSubstitute, torch.Tensor | None] = field(
        default_factory=dict
    )
    _is_model_stale: bool = False

    def find_optimizer_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter that an optimizer updates for a parameter of the module."""
        shard = self.shards.get(parameter)
        if shard is None:
            return parameter
        return shard.updated

    def iterate_optimizer_parameters(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        return (
            (name, self.find_optimizer_parameter(parameter))
            for name, parameter in module.named_parameters()
        )

    def iterate_substitute_parameters(
        self, module: nn.Module
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Named parameters that the optimizer updates and that are not the module's own."""
        return (
            (name, self.shards[p].updated)
            for name, p in module.named_parameters()
            if p in self.shards
        )

    def move_gradients_to_optimizer(self) -> None:
        """After the last backward of a step."""
        # First, for reductions read gradients where the backward left them.
        for reduce in self.before_update:
            reduce()
        devices: set[torch.device] = set()
        for shard in self.shards.values():
            if shard.on_host and shard.parameter.grad is not None:
                devices.add(get_local_tensor(shard.parameter.grad).device)
            self._gradients[shard] = shard.move_gradients_to_optimizer(self._gradients.get(shard))
        # The optimizer reads the copies on the host: they must have arrived.
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def require_optimizer_of_substitute_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises LayoutError for an optimizer of the module's own parameters, which no longer
        have the gradients."""
        replaced = {id(parameter) for parameter in self.shards}
        if any(id(p) in replaced for group in optimizer.param_groups for p in group["params"]):
            raise LayoutError(
                f"{type(optimizer).__name__} has the module's parameters, and in this layout parts"
                " of them are updated",
                fix="build it from model.parameters(), of what parallelize returned",
            )

    def copy_updates_to_model_on_all_ranks(self) -> None:
        """After an optimizer's update: the model sees it, on every rank."""
        self._is_model_stale = False
        # First, for gathers send what lies in the model.
        for shard in self.shards.values():
            shard.copy_updated_values_to_model()
        for gather in self.after_update:
            gather()

    def refresh(self) -> None:
        """After weights were written into the model: copies on the host follow."""
        for shard in self.shards.values():
            shard.copy_model_values_to_host()

    def watch_optimizer_steps(self, moved_with_them: Iterable[nn.Parameter] = ()) -> None:
        """Notice optimizers that update parts: their step alone does not reach the model.

        So it is of `moved_with_them` where something else of the model moves with them.
        """
        # torch's list of hooks would keep the model alive.
        self_ref = weakref.ref(self)
        updated = {
            id(self.find_optimizer_parameter(parameter))
            for parameter in (*self.shards, *moved_with_them)
        }

        def on_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            params = self_ref()
            if params is not None and any(
                id(p) in updated for group in optimizer.param_groups for p in group["params"]
            ):
                params._is_model_stale = True

        # A hook of all optimizers: the one that will be built of these parameters does not exist
        # yet.
        weakref.finalize(self, register_optimizer_step_post_hook(on_step).remove)

    def require_model_updated_after_step(self) -> None:
        """Raises LayoutError where an optimizer stepped and the model never saw it."""
        if self._is_model_stale:
            raise LayoutError(
                "an optimizer updated its part of the model, and the rest has not followed",
                why=(
                    "in this layout it has a part or a copy of each parameter, or biases of routers"
                    " move after it"
                ),
                fix="call model.update(optimizer) in place of optimizer.step()",
            )
