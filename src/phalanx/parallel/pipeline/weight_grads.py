"""Weight gradients that wait: a schedule that splits backwards does what the stage before waits for
first (I), and the gradients of weights, which nobody waits for, when there is nothing else to do
(W).

Linear layers are split so, and the autograd graph is never cut in two: a W is a list of products.
That is nearly all of the work; what a block has besides (norms, biases of its own, products inside
fused operations) is done with I. A W needs no weights, only what went in and what came back: it
does not matter to it whether weights are still gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from phalanx.mesh.casts import disabling_cast_cache
from phalanx.mesh.gathered_input import GatheredInput
from phalanx.mesh.grouped import (
    choose_product_dtype,
    compute_expert_weight_gradients,
    multiply_rows_by_expert_matrices,
    multiply_rows_by_expert_weights,
)
from phalanx.mesh.linear import is_linear_of_several_experts

GradWork = Callable[[], None]

# A linear layer with this attribute defers the gradient of its weight.
DEFERS_WEIGHT_GRADIENT_ATTRIBUTE = "phalanx_splits_backward"


@dataclass
class DeferredWeightGrads:
    """Deferred weight gradients, by stage and microbatch."""

    _due: dict[Hashable, list[GradWork]] = field(default_factory=dict)

    @contextmanager
    def deferring_to(self, key: Hashable) -> Iterator[None]:
        """Backwards inside leave their weight gradients for `compute_deferred_gradients(key)`."""
        # The products are a list and no graph: they need activations and gradients, but no weights,
        # which FSDP may have freed until W comes.
        works = self._due.setdefault(key, [])
        _active_deferred_grads.append(works)
        try:
            yield
        finally:
            _active_deferred_grads.pop()

    @torch.no_grad()
    def compute_deferred_gradients(self, key: Hashable) -> None:
        for work in self._due.pop(key):
            work()

    @property
    def num_deferred_microbatches(self) -> int:
        return len(self._due)


# A backward is asked for by the autograd engine, which hands on no object of ours: this is how it
# finds where to put what is to wait. One backward runs at a time.
_active_deferred_grads: list[list[GradWork]] = []


def defer_weight_gradient(work: GradWork) -> None:
    """Do `work`, which only makes gradients of weights, where the schedule has its W; at once
    outside of a split backward. The backward of an autograd function calls it."""
    if _active_deferred_grads:
        _active_deferred_grads[-1].append(work)
    else:
        work()


def defer_weight_gradients_of_linears(module: nn.Module) -> None:
    """Have every linear layer of `module` put its weight's gradient off where it is asked to,
    also those of experts."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            setattr(part, DEFERS_WEIGHT_GRADIENT_ATTRIBUTE, True)
        if (
            isinstance(part, nn.Linear)
            # A subclass with a forward of its own multiplies in its own way; it reads the attribute
            # if it can wait.
            and type(part).forward is nn.Linear.forward
            and "forward" not in part.__dict__
        ):
            part.forward = _LinearForwardWithDeferredGradient(part)  # type: ignore[method-assign]
        elif is_linear_of_several_experts(part):
            part.forward = _GroupedLinearForwardWithDeferredGradient(part)  # type: ignore[method-assign]


class _LinearForwardWithDeferredGradient:
    """Stands where `part.forward` stood."""

    def __init__(self, part: nn.Linear) -> None:
        self._part = part

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return linear_with_deferred_gradient(input, self._part.weight, self._part.bias)


class _GroupedLinearForwardWithDeferredGradient:
    """The same for the linear layers of several experts."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part

    def __call__(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        weight: Any = self._part.weight
        if not torch.is_grad_enabled() or not weight.requires_grad or not weight.is_leaf:
            return multiply_rows_by_expert_weights(x, weight, counts)
        low = choose_product_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            out: torch.Tensor = _GroupedLinearDeferredGradientFunction.apply(
                x.to(low), weight, counts
            )
        return out


class _GroupedLinearDeferredGradientFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, counts)
        ctx.weight = weight
        return multiply_rows_by_expert_matrices(x, weight.to(x.dtype).transpose(1, 2), counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (x, counts), weight = ctx.saved_tensors, ctx.weight
        grad = grad.contiguous()
        if ctx.needs_input_grad[0]:
            grad_x = multiply_rows_by_expert_matrices(grad, weight.detach().to(grad.dtype), counts)
        else:
            grad_x = None
        if _active_deferred_grads:
            defer_weight_gradient(
                lambda: _add_to_parameter_gradient(
                    weight, compute_expert_weight_gradients(grad, x, counts)
                )
            )
            return grad_x, None, None
        return grad_x, compute_expert_weight_gradients(grad, x, counts).to(weight.dtype), None


def linear_with_deferred_gradient(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gathered_input: tuple[torch.Tensor, GatheredInput] | None = None,
) -> torch.Tensor:
    """F.linear, whose weight's gradient can wait. `gathered_input`: this rank's part of
    `x`, which is saved in its place, and what gathers it again."""
    if (
        not torch.is_grad_enabled()
        or not weight.requires_grad
        # A weight that is computed from others has its gradient passed on at once.
        or not weight.is_leaf
        or torch.compiler.is_compiling()
    ):
        return F.linear(x, weight, bias)
    out: torch.Tensor = _LinearDeferredGradientFunction.apply(
        x, weight, bias, *(gathered_input or ())
    )
    return out


class _LinearDeferredGradientFunction(torch.autograd.Function):
    """Gradients of weight and bias go to their `.grad` by hand: autograd has no second half of a
    backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        part: torch.Tensor | None = None,
        gathered: GatheredInput | None = None,
    ) -> torch.Tensor:
        kind = x.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        ctx.input_dtype, used = x.dtype, x
        if cast is not None and x.dtype is not torch.float64:
            used = x.to(cast)
        ctx.save_for_backward(used if part is None else part)
        ctx.gathered = gathered
        if gathered is not None:
            gathered.add_reader()
        # The parameter itself: what a recomputation saves of it would be another tensor, without
        # its gradient.
        ctx.weight, ctx.bias = weight, bias
        with disabling_cast_cache():
            return F.linear(used, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        if ctx.gathered is not None:
            # Now, and not when the gradient comes: ranks of tp do this in one order.
            x = ctx.gathered.gather_for_reader(x)
        weight, bias = ctx.weight, ctx.bias
        no_gradient = (None,) * (len(ctx.needs_input_grad) - 3)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight.detach().to(grad.dtype)).to(ctx.input_dtype)

        def compute_grads() -> tuple[torch.Tensor, torch.Tensor | None]:
            rows, grad_bias = grad.reshape(-1, grad.shape[-1]), None
            grad_weight = rows.T @ x.reshape(-1, x.shape[-1]).to(rows.dtype)
            if bias is not None and bias.requires_grad:
                grad_bias = rows.sum(0)
            return grad_weight, grad_bias

        def work() -> None:
            for parameter, gradient in zip((weight, bias), compute_grads(), strict=True):
                if gradient is not None:
                    _add_to_parameter_gradient(parameter, gradient)

        if _active_deferred_grads:
            defer_weight_gradient(work)
            return grad_x, None, None, *no_gradient
        grad_weight, grad_bias = compute_grads()
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_x, grad_weight.to(weight.dtype), grad_bias, *no_gradient


def _add_to_parameter_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
