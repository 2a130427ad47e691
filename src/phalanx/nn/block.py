"""The block that decoder and vision transformer repeat: attention and a feed-forward, each behind a norm.

Shape suffixes: B batch, T sequence, D model width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from phalanx.job.shape import ModelShape
from phalanx.nn.attention import Attention
from phalanx.nn.init import InitRule
from phalanx.nn.latent_attention import LatentAttention
from phalanx.nn.norms import build_norm

STD = 0.02

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


class FeedForward(nn.Module):
    """Two matrices with an activation between, or three: the activation of one product gates another (SwiGLU)."""

    input_goes_to_columns_alone = True

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        bias = shape.bias == "all"
        self.activation = ACTIVATIONS[shape.activation]
        self.gate = nn.Linear(shape.dim, shape.ffn_dim, bias=bias) if shape.is_gated else None
        self.up = nn.Linear(shape.dim, shape.ffn_dim, bias=bias)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=bias)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x_BTD)))
        return self.down(self.activation(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """`layer` counts from 0: of some models not every block has the sliding window."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.is_local = shape.is_local(layer)
        self.attention_norm = build_norm(shape)
        attention = LatentAttention if shape.kv_rank else Attention
        self.attention = attention(shape, shape.sliding_window if self.is_local else 0)
        self.attention_post_norm = build_norm(shape) if shape.post_norms else None
        self.ffn_norm = build_norm(shape)
        self.ffn = FeedForward(shape)
        self.ffn_post_norm = build_norm(shape) if shape.post_norms else None

    def forward(
        self,
        x_BTD: torch.Tensor,
        table: torch.Tensor | None,
        positions_BT: torch.Tensor | None,
        document_ids_BT: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attended = self.attention(self.attention_norm(x_BTD), table, positions_BT, document_ids_BT, mask)
        x_BTD = x_BTD + (attended if self.attention_post_norm is None else self.attention_post_norm(attended))
        fed = self.ffn(self.ffn_norm(x_BTD))
        return x_BTD + (fed if self.ffn_post_norm is None else self.ffn_post_norm(fed))


def init_rules(shape: ModelShape) -> tuple[InitRule, ...]:
    """Projections back into the residual stream shrink with depth (GPT-2); norms begin as the identity, biases at 0."""
    residual = STD / (2 * shape.num_layers) ** 0.5
    return (
        InitRule("*norm.weight", constant=0.0 if shape.norm_plus_one else 1.0),
        InitRule("*.bias", constant=0.0),
        InitRule("*.attention.o.weight", std=residual),
        InitRule("*.ffn.down.weight", std=residual),
        InitRule("*", std=STD),
    )
