"""RMSNorm and LayerNorm over the last dimension.

Weights follow the input's type: fused kernels need that. Autocast may compute norms wider; what
comes out has the input's type again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from phalanx.job.shapes.transformer import TransformerShape


class RMSNorm(nn.Module):
    """Root-mean-square norm. With `plus_one` it multiplies by 1 + weight (Gemma)."""

    def __init__(self, dim: int, eps: float, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps, self.plus_one = eps, plus_one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if self.plus_one:
            weight = 1 + weight
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """With weight and bias."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, (x.shape[-1],), weight, bias, self.eps).to(x.dtype)


def build_norm(shape: TransformerShape) -> nn.Module:
    """A norm of the residual stream."""
    if shape.norm == "layernorm":
        return LayerNorm(shape.dim, shape.norm_eps)
    return RMSNorm(shape.dim, shape.norm_eps, shape.norm_plus_one)
