"""The feed-forward of a block. Shape suffixes: B batch, T sequence, D model width."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from phalanx.job.shapes.transformer import TransformerShape

ACTIVATION_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


class FeedForward(nn.Module):
    """Two matrices with an activation between, or three: the activation of one product gates
    another (SwiGLU)."""

    input_goes_to_columns_alone = True

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        bias = shape.bias == "all"
        self.activation = ACTIVATION_FUNCTIONS[shape.activation]
        self.gate = nn.Linear(shape.dim, shape.ffn_dim, bias=bias) if shape.is_gated else None
        self.up = nn.Linear(shape.dim, shape.ffn_dim, bias=bias)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=bias)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x_BTD)))
        return self.down(self.activation(self.gate(x_BTD)) * self.up(x_BTD))
