"""Dropout that does not depend on the layout: every layer's mask is made by place (`rng`), each
rank its own rows.

Modules are not replaced: each becomes an instance of a class derived from its own, so that names,
types and hooks stay the user's. What draws otherwise (F.dropout in a forward, attention, recurrent
layers) is seen to by `interceptor`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from phalanx.mesh.logical import full_name
from phalanx.parallel.dropout.rng import DropoutRng
from phalanx.parallel.protocol import ParallelContext, TransformOrder
from phalanx.plan.plan import Plan

# SELU's alpha x scale: what alpha dropout puts in place of what it drops.
SELU_NEGATIVE_SATURATION = 1.7580993408473766


class LayoutIndependentDropout:
    order = TransformOrder.DROPOUT

    def is_needed(self, plan: Plan) -> bool:
        return plan.parallel.dropout == "global"

    def apply(self, context: ParallelContext) -> None:
        if context.plan.compile and context.plan.activations.recompute != "none":
            # The compiler recomputes in its own way and draws its own numbers.
            return
        module = context.root.module
        time_first = find_layers_with_batch_in_dim_1(module)
        for name, part in module.named_modules():
            if isinstance(part, _DropoutNd) and any(
                isinstance(part, known) for known in _COUNTER_RNG_CLASS_OF_TORCH_CLASS
            ):
                _make_dropout_use_counter_rng(
                    full_name(name),
                    part,
                    context.dropout_rng,
                    rows_dim=int(full_name(name) in time_first),
                )


def find_layers_with_batch_in_dim_1(module: nn.Module) -> set[str]:
    """Layers inside torch's own that have the batch in dimension 1: batch_first=False, and
    recurrent ones inside."""
    modules = set()
    for name, part in module.named_modules():
        if isinstance(part, nn.RNNBase):
            modules.add(full_name(name))
        is_transformer = isinstance(part, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
        if is_transformer and not part.self_attn.batch_first:
            prefix = f"{name}." if name else ""
            for inner, layer in part.named_children():
                if isinstance(layer, _DropoutNd):
                    modules.add(full_name(prefix + inner))
    return modules


class _CounterRngDropoutMixin(_DropoutNd):
    """Stands between a user's class and torch's: a user's forward still comes first."""

    _dropout_rng: DropoutRng
    _name: str
    _rows_dim: int = 0

    @torch.compiler.disable
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        shape = self._compute_mask_shape(input)
        mask = None
        if self.training and 0.0 < self.p < 1.0 and shape is not None:
            mask = self._dropout_rng.draw_mask(
                self._name, 1.0 - self.p, shape, input.device, rows_dim=self._rows_dim
            )
        if mask is None:
            return super().forward(input)  # type: ignore[misc, no-any-return]
        return self._apply_mask(input, mask)

    def _compute_mask_shape(self, input: torch.Tensor) -> tuple[int, ...] | None:
        """Shape of the noise, as torch has it; None for an input without a batch."""
        return tuple(input.shape)

    def _apply_mask(self, input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scale = 1.0 / (1.0 - self.p)
        if self.inplace:
            return input.mul_(mask.to(input.dtype).mul_(scale))
        output: torch.Tensor = _MultiplyByMask.apply(input, mask, scale)
        return output


class _ChannelDropoutMixin(_CounterRngDropoutMixin):
    """One element for a whole channel."""

    # An input of so many dimensions has no batch. 0: torch's dropout2d takes three for [N, C, L].
    _unbatched_ndim = 0

    def _compute_mask_shape(self, input: torch.Tensor) -> tuple[int, ...] | None:
        if input.ndim < 2 or input.ndim == self._unbatched_ndim:
            return None
        return (*input.shape[:2], *(1,) * (input.ndim - 2))


class _AlphaDropoutMixin(_CounterRngDropoutMixin):
    """Dropped elements become SELU's least value; mean and variance stay (Klambauer et al.
    2017)."""

    def _apply_mask(self, input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        # As torch's own, with m the mask: a (x m + alpha (m - 1) + alpha p),
        # where a = ((alpha^2 p + 1) (1 - p))^(-1/2).
        scale = 1.0 / math.sqrt((SELU_NEGATIVE_SATURATION**2 * self.p + 1.0) * (1.0 - self.p))
        noise = mask.to(input.dtype)
        shift = (
            (noise - 1.0)
            .mul_(SELU_NEGATIVE_SATURATION * scale)
            .add_(SELU_NEGATIVE_SATURATION * scale * self.p)
        )
        noise = noise.mul_(scale)
        if self.inplace:
            return input.mul_(noise).add_(shift)
        return input * noise + shift


class CounterRngDropoutLayer(_CounterRngDropoutMixin, nn.Dropout):
    pass


class CounterRngDropout1d(_ChannelDropoutMixin, nn.Dropout1d):
    _unbatched_ndim = 2


class CounterRngDropout2d(_ChannelDropoutMixin, nn.Dropout2d):
    pass


class CounterRngDropout3d(_ChannelDropoutMixin, nn.Dropout3d):
    _unbatched_ndim = 4


class CounterRngAlphaDropout(_AlphaDropoutMixin, nn.AlphaDropout):
    pass


class CounterRngFeatureAlphaDropout(
    _AlphaDropoutMixin, _ChannelDropoutMixin, nn.FeatureAlphaDropout
):
    pass


_COUNTER_RNG_CLASS_OF_TORCH_CLASS: dict[type[_DropoutNd], type[_CounterRngDropoutMixin]] = {
    nn.Dropout: CounterRngDropoutLayer,
    nn.Dropout1d: CounterRngDropout1d,
    nn.Dropout2d: CounterRngDropout2d,
    nn.Dropout3d: CounterRngDropout3d,
    nn.AlphaDropout: CounterRngAlphaDropout,
    nn.FeatureAlphaDropout: CounterRngFeatureAlphaDropout,
}


def _make_dropout_use_counter_rng(
    name: str, module: _DropoutNd, dropout_rng: DropoutRng, *, rows_dim: int
) -> None:
    """Change the class of `module` in place."""
    module.__class__ = _derive_counter_rng_dropout_class(type(module))  # type: ignore[arg-type]  # torch's classes are Any
    assert isinstance(module, _CounterRngDropoutMixin)
    module._dropout_rng, module._name, module._rows_dim = dropout_rng, name, rows_dim


@functools.cache
def _derive_counter_rng_dropout_class(original: type[_DropoutNd]) -> type[_CounterRngDropoutMixin]:
    if original in _COUNTER_RNG_CLASS_OF_TORCH_CLASS:
        return _COUNTER_RNG_CLASS_OF_TORCH_CLASS[original]
    counted = next(
        _COUNTER_RNG_CLASS_OF_TORCH_CLASS[known]
        for known in original.__mro__
        if known in _COUNTER_RNG_CLASS_OF_TORCH_CLASS
    )
    # In this order `super().forward` of a user's class finds ours before torch's.
    bases = (
        original,
        counted,
    )
    return type(f"Counted{original.__name__}", bases, {"__module__": original.__module__})


class _MultiplyByMask(torch.autograd.Function):
    """input x mask x scale. Keeps a byte per element for the backward, not a number."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (input * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:  # type: ignore[override]
        (mask,) = ctx.saved_tensors
        return _MultiplyByMask.apply(grad_output, mask, ctx.scale), None, None


parallelism = LayoutIndependentDropout()
