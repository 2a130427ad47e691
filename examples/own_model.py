"""Your own model under `phalanx train`: any factory that returns an nn.Module from token ids to
logits.

cd examples
phalanx train model.kind=own_model:build 'model.args={dim = 96}' train.steps=100
"""

from __future__ import annotations

import torch
from torch import nn


class CausalConv(nn.Module):
    """One block: a causal convolution with a gate and a residual."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, 2 * dim, width)
        self.pad = width - 1

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BDT = nn.functional.pad(self.norm(x_BTD).transpose(1, 2), (self.pad, 0))
        value, gate = self.conv(x_BDT).chunk(2, dim=1)
        return x_BTD + (value * gate.sigmoid()).transpose(1, 2)


class ConvNet(nn.Module):
    """A gated convolutional language model.

    Its ModuleList tells phalanx what to shard and recompute as one unit.
    """

    def __init__(self, vocab_size: int, dim: int, num_blocks: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(CausalConv(dim, width) for _ in range(num_blocks))
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[B, T] token ids to [B, T, vocab] logits."""
        x_BTD = self.embed(inputs)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD)


def build(vocab_size: int = 257, dim: int = 64, num_blocks: int = 4, width: int = 5) -> nn.Module:
    """Bytes need 257 tokens: 256 values and the end of a document."""
    return ConvNet(vocab_size, dim, num_blocks, width)
