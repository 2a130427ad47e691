"""The reference: the untouched module in one process, in a plain loop.

Knows no layouts, imports torch alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        module.zero_grad()
        loss, count, first_row = 0.0, 0, 0
        for batch in microbatches:
            num_rows = len(next(iter(batch.values())))
            with around(number + 1, first_row, num_rows):
                total, targets = loss_sum(module, batch)
            first_row += num_rows
            total.backward()
            loss, count = loss + total.item(), count + int(targets)
        if not count:
            raise ArithmeticError(f"step {number + 1} has no target")
        named = dict(module.named_parameters())
        for parameter in named.values():
            if parameter.grad is not None:
                parameter.grad /= count
        gradients = {name: p.grad for name, p in named.items()}
        norm = (
            sum(g.double().square().sum().item() for g in gradients.values() if g is not None)
            ** 0.5
        )
        if not 0 < norm < math.inf or not abs(loss) < math.inf:
            raise ArithmeticError(
                f"in step {number + 1} the loss is {loss / count:g} and the gradient norm {norm:g}:"
                " no reference"
            )
        if number == 0:
            size = sum(p.detach().double().square().sum().item() for p in named.values()) ** 0.5
            lr = move * size / norm
        clips = optimizer is None and (number > 0 or len(steps) == 1)
        max_norm = clip * norm if clips else None
        yield AloneStep(loss / count, count, norm, max_norm, lr, gradients)
        if hasattr(module, "after_step"):
            module.after_step()
        if optimizer is not None:
            optimizer.step()
            continue
        with torch.no_grad():
            for parameter in named.values():
                if parameter.grad is not None:
                    parameter -= (
                        lr * (1.0 if max_norm is None else max_norm / norm) * parameter.grad
                    )


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
        parameter_names = [
            f"{prefix}.{name}" if prefix else name
            for name, _ in part.named_parameters(recurse=False)
        ]
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
    names = [name for name, _ in module.named_parameters()]
    reached = dict.fromkeys(name for name in order if name in set(names))
    return [*reached, *(name for name in names if name not in reached)]
