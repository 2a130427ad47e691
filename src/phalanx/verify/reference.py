"""The reference: the untouched module in one process, in a plain loop.

Knows no layouts, imports torch alone: it shares nothing with what is compared with it. What it
computes lies in files (`verify.trace`), and ranks compare the blocks that they hold with slices of
them. Its own mistakes are looked for with bugs planted in `parallel`, `mesh` and `nn`, never in
what compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

Batch = Mapping[str, torch.Tensor]
LossSum = Callable[[nn.Module, Batch], tuple[torch.Tensor, torch.Tensor]]
"""(sum of the losses of a batch's targets, how many they are)."""
ForwardContext = Callable[[int, int, int], AbstractContextManager[None]]
"""What a forward runs in: of (step, counted from 1; its first row of the step's batch; how many
rows)."""


@dataclass(frozen=True)
class OneProcessStep:
    """One step: loss per target; `grad_norm` and `gradients` before clipping, None where a
    parameter had no part. `lr`: of the optimizer in every step."""

    loss: float
    num_targets: int
    grad_norm: float
    max_norm: float | None
    lr: float
    gradients: dict[str, torch.Tensor | None]


class OneProcessObserver(Protocol):
    """Is called in each step of `train_in_one_process`; steps are counted from 0."""

    def on_gradients(self, number: int, step: OneProcessStep) -> None:
        """When the gradients of a step are there."""

    def on_update(self, number: int) -> None:
        """When the weights of a step are there."""


class AppliedGradients(Protocol):
    """The gradients that every run of these steps applies, whatever its own are, so that all of
    them have equal weights in every step. `lr`: of the optimizer."""

    @property
    def lr(self) -> float: ...

    def read(self, step: int, name: str) -> torch.Tensor:
        """The whole gradient of a parameter, clipped."""


def train_in_one_process(
    module: nn.Module,
    loss_sum: LossSum,
    steps: Sequence[Sequence[Batch]],
    build_optimizer: Callable[[float | None], torch.optim.Optimizer],
    observer: OneProcessObserver,
    *,
    clip: float,
    move: float,
    around: ForwardContext = lambda step, first_row, num_rows: nullcontext(),
    applied: AppliedGradients | None = None,
    loss_scale: float = 1.0,
) -> None:
    """Train `module` for `steps`, each a list of microbatches, and show each step to `observer`.

    `build_optimizer(lr)` makes one over the module's parameters; None is the learning rate of the
    job. In place of that, the first update moves the weights by `move` of their norm. From the
    second step on (the only one, if there is one) gradients are clipped to `clip` x their norm, so
    that clipping is active. With `applied`, its gradients and its learning rate are used for
    updates. A tied tensor has its first name. Gradients are computed of `loss_scale` x loss.
    """
    optimizer: torch.optim.Optimizer | None = None
    lr = 0.0
    for number, microbatches in enumerate(steps):
        loss, count = _accumulate_one_process_gradients(
            module, loss_sum, microbatches, number + 1, around, loss_scale
        )
        if not count:
            raise ArithmeticError(f"step {number + 1} has no target")
        named = dict(module.named_parameters())

        # Once, by the targets of all microbatches: a mean of their means would weigh them alike.
        for parameter in named.values():
            if parameter.grad is not None:
                parameter.grad /= count * loss_scale
        gradients = {name: parameter.grad for name, parameter in named.items()}
        norm = _compute_l2_norm(gradients.values())
        # So that NaN is refused, too.
        if not 0 < norm < math.inf or not abs(loss) < math.inf:
            raise ArithmeticError(
                f"in step {number + 1} the loss is {loss / count:g} and the gradient norm {norm:g}:"
                " no reference"
            )
        if optimizer is None:
            lr = (
                _find_learning_rate_for_movement(named, build_optimizer, move)
                if applied is None
                else applied.lr
            )
            optimizer = build_optimizer(lr)
        max_norm = None
        if number > 0 or len(steps) == 1:
            max_norm = clip * norm
        observer.on_gradients(
            number, OneProcessStep(loss / count, count, norm, max_norm, lr, gradients)
        )
        # Routers move their biases by the load of the step (`Decoder.after_step`).
        if hasattr(module, "after_step"):
            module.after_step()
        _clip_or_replace_gradients(
            named, number, applied, 1.0 if max_norm is None else max_norm / norm
        )
        optimizer.step()
        observer.on_update(number)


@torch.no_grad()
def _find_learning_rate_for_movement(
    named: Mapping[str, nn.Parameter],
    build_optimizer: Callable[[float | None], torch.optim.Optimizer],
    move: float,
) -> float:
    """The learning rate with which the first update moves the weights by `move` of their norm: it
    is tried once with the job's, and taken back."""
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizer = build_optimizer(None)
    optimizer.step()
    moved = _compute_l2_norm(parameter - before[name] for name, parameter in named.items())
    for name, parameter in named.items():
        parameter.copy_(before[name])
    lr = max(float(group["lr"]) for group in optimizer.param_groups)
    if not 0 < moved < math.inf:
        raise ArithmeticError(f"an update moves the weights by {moved:g}: no reference")
    return lr * move * _compute_l2_norm(before.values()) / moved


@torch.no_grad()
def _clip_or_replace_gradients(
    named: Mapping[str, nn.Parameter],
    step: int,
    applied: AppliedGradients | None,
    clipping: float,
) -> None:
    """Clip the module's own gradients, or put those of `applied` in their place."""
    for name, parameter in named.items():
        if parameter.grad is None:
            continue
        if applied is None:
            parameter.grad *= clipping
        else:
            parameter.grad.copy_(applied.read(step, name))


def _accumulate_one_process_gradients(
    module: nn.Module,
    loss_sum: LossSum,
    microbatches: Sequence[Batch],
    step: int,
    around: ForwardContext,
    loss_scale: float,
) -> tuple[float, int]:
    """(sum of the losses of a step, number of its targets); leaves the gradients of `loss_scale` x
    that sum in `module`. `step` is counted from 1."""
    module.zero_grad()
    loss, count, first_row = 0.0, 0, 0
    for batch in microbatches:
        num_rows = len(next(iter(batch.values())))
        with around(step, first_row, num_rows):
            total, targets = loss_sum(module, batch)
        first_row += num_rows
        (total * loss_scale).backward()
        loss, count = loss + total.item(), count + int(targets)
    return loss, count


def _compute_l2_norm(tensors: Iterable[torch.Tensor | None]) -> float:
    """The L2 norm of all elements together, summed in float64."""
    squares = []
    for tensor in tensors:
        if tensor is not None:
            squares.append(tensor.detach().double().square().sum().item())
    return float(sum(squares)) ** 0.5


@torch.no_grad()
def evaluate_in_one_process(
    module: nn.Module, loss_sum: LossSum, microbatches: Sequence[Batch]
) -> tuple[float, int]:
    """(loss per target in evaluation mode, as the module is; number of targets)."""
    loss, count, was_training = 0.0, 0, module.training
    module.eval()
    for batch in microbatches:
        total, targets = loss_sum(module, batch)
        loss, count = loss + total.item(), count + int(targets)
    module.train(was_training)
    return loss / count, count


def list_parameters_in_forward_order(module: nn.Module, call: Callable[[], Any]) -> list[str]:
    """Names of the parameters in the order in which a forward reaches the modules that hold
    them; the rest follows."""
    order: list[str] = []
    hooks = []
    for prefix, part in module.named_modules():
        own_parameters = part.named_parameters(prefix, recurse=False)
        parameter_names = [name for name, _ in own_parameters]
        if parameter_names:
            hooks.append(
                part.register_forward_pre_hook(
                    lambda *_, names=parameter_names: order.extend(names)
                )
            )
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    # A tied tensor is reached by all its names; named_parameters has the first alone.
    names = dict(module.named_parameters())
    reached = dict.fromkeys(name for name in order if name in names)
    return list(reached | dict.fromkeys(names))
