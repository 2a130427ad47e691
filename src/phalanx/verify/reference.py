"""The reference: the untouched module in one process, in a plain loop.

Knows no layouts, imports torch alone: it shares nothing with what is compared with it. What it
computes lies in files (`verify.trace`), and ranks compare the blocks that they hold with slices of
them. Its own mistakes are looked for with bugs planted in `parallel`, `mesh` and `nn`, never in
what compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = Mapping[str, torch.Tensor]
LossSum = Callable[[nn.Module, Batch], tuple[torch.Tensor, torch.Tensor]]
"""(sum of the losses of a batch's targets, how many they are)."""
Around = Callable[[int, int, int], AbstractContextManager[None]]
"""What a forward runs in: of (step, counted from 1; its first row of the step's batch; how many
rows)."""


@dataclass(frozen=True)
class AloneStep:
    """One step: loss per target; `grad_norm` and `gradients` before clipping, None where a
    parameter had no part."""

    loss: float
    num_targets: int
    grad_norm: float
    max_norm: float | None
    lr: float
    gradients: dict[str, torch.Tensor | None]


def train_alone(
    module: nn.Module,
    loss_sum: LossSum,
    steps: Sequence[Sequence[Batch]],
    *,
    clip: float,
    move: float,
    optimizer: torch.optim.Optimizer | None = None,
    around: Around = lambda step, first_row, num_rows: nullcontext(),
) -> Iterator[AloneStep]:
    """Plain gradient descent over `steps`, each a list of microbatches; yields when a step's
    gradients are there.

    Or the steps of an `optimizer` over the module's parameters, without clipping.

    From the second step on (the only one, if there is one) gradients are clipped to `clip` x their
    norm, so that clipping is active. The learning rate moves the weights by `move` of their norm in
    the first step. A tied tensor has its first name.
    """
    lr = 0.0
    for number, microbatches in enumerate(steps):
        loss, count = _run_microbatches(module, loss_sum, microbatches, number + 1, around)
        if not count:
            raise ArithmeticError(f"step {number + 1} has no target")
        named = dict(module.named_parameters())

        # Once, by the targets of all microbatches: a mean of their means would weigh them alike.
        for parameter in named.values():
            if parameter.grad is not None:
                parameter.grad /= count
        gradients = {name: parameter.grad for name, parameter in named.items()}
        norm = _norm(gradients.values())
        # So that NaN is refused, too.
        if not 0 < norm < math.inf or not abs(loss) < math.inf:
            raise ArithmeticError(
                f"in step {number + 1} the loss is {loss / count:g} and the gradient norm {norm:g}:"
                " no reference"
            )
        if number == 0:
            lr = move * _norm(named.values()) / norm
        max_norm, factor = None, 1.0
        if optimizer is None and (number > 0 or len(steps) == 1):
            max_norm = clip * norm
            factor = max_norm / norm
        yield AloneStep(loss / count, count, norm, max_norm, lr, gradients)
        # Routers move their biases by the load of the step (`Decoder.after_step`).
        if hasattr(module, "after_step"):
            module.after_step()
        if optimizer is None:
            _descend(named.values(), lr * factor)
        else:
            optimizer.step()


def _run_microbatches(
    module: nn.Module, loss_sum: LossSum, microbatches: Sequence[Batch], step: int, around: Around
) -> tuple[float, int]:
    """(sum of the losses of a step, number of its targets); leaves the gradients of that sum in
    `module`. `step` is counted from 1."""
    module.zero_grad()
    loss, count, first_row = 0.0, 0, 0
    for batch in microbatches:
        num_rows = len(next(iter(batch.values())))
        with around(step, first_row, num_rows):
            total, targets = loss_sum(module, batch)
        first_row += num_rows
        total.backward()
        loss, count = loss + total.item(), count + int(targets)
    return loss, count


def _norm(tensors: Iterable[torch.Tensor | None]) -> float:
    """The L2 norm of all elements together, summed in float64."""
    squares = []
    for tensor in tensors:
        if tensor is not None:
            squares.append(tensor.detach().double().square().sum().item())
    return float(sum(squares)) ** 0.5


@torch.no_grad()
def _descend(parameters: Iterable[torch.Tensor], rate: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter -= rate * parameter.grad


@torch.no_grad()
def evaluate_alone(module: nn.Module, loss_sum: LossSum, microbatches: Sequence[Batch]) -> float:
    """Loss per target in evaluation mode, as the module is."""
    loss, count, was_training = 0.0, 0, module.training
    module.eval()
    for batch in microbatches:
        total, targets = loss_sum(module, batch)
        loss, count = loss + total.item(), count + int(targets)
    module.train(was_training)
    return loss / count


def forward_order(module: nn.Module, call: Callable[[], Any]) -> list[str]:
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
