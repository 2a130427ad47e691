"""Products in fp8 by their definition, on any device: what goes into each is rounded to 8 bits with
one scale, and the rest is computed in float32.

Imports torch alone: a second version of what `parallel.compute.fp8` has torchao do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

FORWARD_TYPE, BACKWARD_TYPE = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST_AMAX = 1e-12
# What kernels take widths of matrices in.
WIDTH_MULTIPLE = 16
LARGEST_SPARE_ROOM = 2.0

DrawSpareRoom = Callable[[], float]


def round_to_fp8(tensor: torch.Tensor, kind: torch.dtype, spare_room: float = 1.0) -> torch.Tensor:
    """`tensor` in float32, as 8 bits have it: with one scale that brings its largest element to the
    largest of `kind`, or to that over `spare_room`."""
    largest = tensor.detach().abs().max().double().clamp(min=SMALLEST_AMAX) * spare_room
    scale = (torch.finfo(kind).max / largest).float()
    return (tensor.float() * scale).to(kind).float() / scale


class Fp8Product(torch.autograd.Function):
    """x [..., in] times weight [out, in], transposed."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, draw_spare_room: DrawSpareRoom
    ) -> torch.Tensor:
        rows = round_to_fp8(x.flatten(0, -2), FORWARD_TYPE, draw_spare_room())
        low_weight = round_to_fp8(weight, FORWARD_TYPE)
        ctx.save_for_backward(rows, low_weight)
        ctx.draw_spare_room, ctx.types = draw_spare_room, (x.dtype, weight.dtype)
        return (rows @ low_weight.T).to(x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        rows, low_weight = ctx.saved_tensors
        low_grad = round_to_fp8(grad.flatten(0, -2), BACKWARD_TYPE, ctx.draw_spare_room())
        of_x, of_weight = ctx.types
        grad_x = (low_grad @ low_weight).to(of_x).unflatten(0, grad.shape[:-1])
        return grad_x, (low_grad.T @ rows).to(of_weight), None


def use_fp8_products(module: nn.Module, compute_dtype: torch.dtype, seed: int) -> int:
    """Have the linear layers of lists of blocks multiply in fp8, of inputs in `compute_dtype`;
    how many.

    A layout's ranks have scales of their own, by the largest elements of what they hold: with a
    `seed` above 0 each product draws how much larger than its own the largest element is taken to
    be, up to twice.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw_spare_room() -> float:
        if seed == 0:
            return 1.0
        return LARGEST_SPARE_ROOM ** float(torch.rand((), generator=generator))

    layers: dict[nn.Linear, None] = {}
    for blocks in module.modules():
        if isinstance(blocks, nn.ModuleList):
            layers |= dict.fromkeys(part for part in blocks.modules() if _is_suited(part))
    for layer in layers:
        layer.forward = partial(_multiply, layer, compute_dtype, draw_spare_room)  # type: ignore[method-assign]
    return len(layers)


def _is_suited(part: nn.Module) -> bool:
    return type(part) is nn.Linear and not (
        part.in_features % WIDTH_MULTIPLE or part.out_features % WIDTH_MULTIPLE
    )


def _multiply(
    layer: nn.Linear, compute_dtype: torch.dtype, draw_spare_room: DrawSpareRoom, x: torch.Tensor
) -> torch.Tensor:
    # torch.autocast would compute the products of what was rounded in fewer digits.
    with torch.autocast(x.device.type, enabled=False):
        out: torch.Tensor = Fp8Product.apply(x.to(compute_dtype), layer.weight, draw_spare_room)
        if layer.bias is not None:
            out = out + layer.bias.to(out.dtype)
        return out
