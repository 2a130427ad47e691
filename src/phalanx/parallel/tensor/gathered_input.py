"""Column-parallel layers that keep this rank's part of their gathered input for the backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from phalanx.mesh.casts import cast_weight_through_cache
from phalanx.mesh.gathered_input import GatheredInput, RegionInput
from phalanx.mesh.linear import is_transformers_conv1d
from phalanx.parallel.pipeline.weight_grads import (
    DEFERS_WEIGHT_GRADIENT_ATTRIBUTE,
    linear_with_deferred_gradient,
)
from phalanx.parallel.tensor.overlap import REGION_INPUT_ATTRIBUTE


def keep_part_of_gathered_input(column: nn.Module, region: RegionInput) -> None:
    """Have a linear layer inside of a region keep a part of the region's input, where it is called
    with that very tensor."""
    if not _multiplies_as_torch_does(column):
        return
    column.forward = functools.partial(  # type: ignore[method-assign]
        _forward_of_gathered_input, column, column.forward, region
    )


def keep_gathered_inputs_of(block: nn.Module) -> None:
    """Leave inputs of the regions of `block` as they are gathered: a block that is recomputed keeps
    none of them, and its recomputation gathers them anyway."""
    for region in _iterate_region_inputs(block):
        region.is_kept = True


def list_groups_of_region_inputs(block: nn.Module) -> frozenset[str]:
    """Names of the process groups that gather inputs of regions of `block` which nothing but
    column-parallel layers reads."""
    return frozenset(region.group.name for region in _iterate_region_inputs(block))


def _iterate_region_inputs(block: nn.Module) -> Iterator[RegionInput]:
    for part in block.modules():
        region = getattr(part, REGION_INPUT_ATTRIBUTE, None)
        if region is not None and region.group.gathers_input_again:
            yield region


def _multiplies_as_torch_does(column: nn.Module) -> bool:
    """False for a user's layer with a forward of its own."""
    if getattr(column, DEFERS_WEIGHT_GRADIENT_ATTRIBUTE, False):
        return type(column).forward is nn.Linear.forward
    has_own_forward = "forward" in column.__dict__
    is_plain = isinstance(column, nn.Linear) and type(column).forward is nn.Linear.forward
    return not has_own_forward and (is_plain or is_transformers_conv1d(column))


def _forward_of_gathered_input(
    column: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], region: RegionInput, x: Any
) -> torch.Tensor:
    weight: Any = column.weight
    if not torch.is_grad_enabled() or not weight.requires_grad:
        return forward(x)
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
    part_and_input = region.find_part_of(x, dtype)
    if part_and_input is None:
        return forward(x)
    part, gathered = part_and_input
    bias: Any = column.bias
    if getattr(column, DEFERS_WEIGHT_GRADIENT_ATTRIBUTE, False):
        return linear_with_deferred_gradient(x, weight, bias, (part, gathered))
    # Cast here, where autograd sees it: the function below gives gradients of the compute type.
    weight = cast_weight_through_cache(weight, dtype)
    if bias is not None:
        bias = bias.to(dtype)
    out: torch.Tensor = _LinearOfGatheredInputFunction.apply(
        x.to(dtype), part, weight, bias, gathered, is_transformers_conv1d(column)
    )
    return out


class _LinearOfGatheredInputFunction(torch.autograd.Function):
    """F.linear of all tokens, in the compute type; `is_transposed`: by a weight of [inputs,
    outputs]. The same products as autograd's own, so that gradients have the same bits."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        part: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gathered: GatheredInput,
        is_transposed: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(part, weight)
        ctx.gathered, ctx.is_transposed = gathered, is_transposed
        ctx.adds_bias = is_transposed or x.is_contiguous()
        gathered.add_reader()
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight.T if is_transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        part, weight = ctx.saved_tensors
        x = ctx.gathered.gather_for_reader(part)
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (rows @ (weight.T if ctx.is_transposed else weight)).view(x.shape)
        flat_x = x.reshape(-1, x.shape[-1])
        grad_weight = flat_x.T @ rows if ctx.is_transposed else rows.T @ flat_x
        if ctx.needs_input_grad[3]:
            # As torch does it: of rows where its product adds the bias, else of the whole tensor.
            grad_bias = rows.sum(0) if ctx.adds_bias else grad.sum(tuple(range(grad.ndim - 1)))
        return grad_x, None, grad_weight, grad_bias, None, None
