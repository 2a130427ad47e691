"""What an objective returned, looked at before anything is made of it."""

from __future__ import annotations

import math
from typing import Any

import torch

from phalanx.core.errors import LayoutError


def require_loss_sum_and_num_targets(outcome: Any) -> None:
    """An objective returns (loss_sum, num_targets); what is easily returned instead is a mean
    loss."""
    fix = (
        "return (loss_sum, num_targets): the sum of the losses, a tensor of no dimensions, and how"
        " many they are"
    )
    if not isinstance(outcome, tuple) or len(outcome) != 2:
        raise LayoutError(f"the objective returned {_describe_returned_type(outcome)}", fix=fix)
    loss, targets = outcome
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.is_floating_point():
        raise LayoutError(f"the objective's loss_sum is {_describe_returned_type(loss)}", fix=fix)
    if (isinstance(targets, torch.Tensor) and targets.ndim) or not isinstance(
        targets, torch.Tensor | int | float
    ):
        raise LayoutError(
            f"the objective's num_targets is {_describe_returned_type(targets)}", fix=fix
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise LayoutError(
            "the objective's loss_sum has no gradient",
            fix=(
                "compute it from the model's outputs with torch, without detach(), item() or"
                " no_grad"
            ),
        )


def require_number_of_targets(num_targets: float) -> None:
    """The targets of all microbatches and ranks, by which losses and gradients are divided. Looked
    at when ranks have it: to ask a device for that of a microbatch would wait for it."""
    if not math.isfinite(num_targets) or num_targets < 0:
        raise LayoutError(
            f"the objective's num_targets add up to {num_targets:g} over microbatches and ranks",
            why="losses and gradients are divided by it",
            fix="return how many targets loss_sum is of: a count, 0 where there is none",
        )


def _describe_returned_type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}" + (
        f" of {len(value)}" if isinstance(value, tuple | list) else ""
    )
