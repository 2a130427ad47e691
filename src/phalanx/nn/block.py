"""The block that decoder and vision transformer repeat: attention and a feed-forward, each behind a
norm.

Shape suffixes: B batch, T sequence, D model width.
"""

from __future__ import annotations

import torch
from torch import nn

from phalanx.job.shapes.decoder import DecoderShape
from phalanx.job.shapes.transformer import TransformerShape
from phalanx.nn.attention import Attention
from phalanx.nn.experts import MixtureOfExperts
from phalanx.nn.feed_forward import FeedForward
from phalanx.nn.init import InitRule
from phalanx.nn.latent_attention import LatentAttention
from phalanx.nn.norms import build_norm
from phalanx.nn.routing import ExpertBalance

# Of initial weights, as in GPT-2.
INIT_STD = 0.02


class Block(nn.Module):
    """`layer` counts from 0: of some models not every block has the sliding window, or experts.

    `balance`: what the routers of all blocks share; for a model with experts.
    """

    def __init__(
        self, shape: TransformerShape, layer: int, balance: ExpertBalance | None = None
    ) -> None:
        super().__init__()
        window = shape.window_of_layer(layer)
        self.is_local, self.has_experts = window > 0, shape.has_experts(layer)
        self.attention_norm = build_norm(shape)
        self.attention = _build_attention(shape, window)
        self.attention_post_norm = build_norm(shape) if shape.post_norms else None
        self.ffn_norm = build_norm(shape)
        if shape.has_experts(layer):
            assert balance is not None, "the routers of a model share one"
            assert isinstance(shape, DecoderShape)
            self.moe = MixtureOfExperts(shape, balance)
        else:
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
        attended = self.attention(
            self.attention_norm(x_BTD), table, positions_BT, document_ids_BT, mask
        )
        if self.attention_post_norm is not None:
            attended = self.attention_post_norm(attended)
        # Not in place, here and below: the backward of a norm needs what the norm was given.
        x_BTD = x_BTD + attended
        feed_forward = self.moe if self.has_experts else self.ffn
        fed = feed_forward(self.ffn_norm(x_BTD))
        if self.ffn_post_norm is not None:
            fed = self.ffn_post_norm(fed)
        return x_BTD + fed


def _build_attention(shape: TransformerShape, window: int) -> nn.Module:
    if isinstance(shape, DecoderShape) and shape.has_latent_attention:
        return LatentAttention(shape, window)
    return Attention(shape, window)


def list_block_init_rules(shape: TransformerShape) -> tuple[InitRule, ...]:
    """Projections back into the residual stream shrink with depth (GPT-2); norms begin as the
    identity, biases at 0."""
    # Each block adds to the stream twice.
    residual = INIT_STD / (2 * shape.num_layers) ** 0.5
    return (
        InitRule("*norm.weight", constant=0.0 if shape.norm_plus_one else 1.0),
        InitRule("*.bias", constant=0.0),
        InitRule("*.attention.o.weight", std=residual),
        InitRule("*.down.weight", std=residual),
        InitRule("*", std=INIT_STD),
    )
