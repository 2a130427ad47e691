"""A module of someone's own for `benchmarks/planner_truth.py`: the plan sees of it what it sees of
any user's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class MixerBlock(nn.Module):
    """A causal depthwise convolution with a gate, and a feed-forward."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.enter, self.leave = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.mix = nn.Conv1d(dim, dim, 4, groups=dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        value, gate = self.enter(self.norm1(x_BTD)).chunk(2, dim=-1)
        mixed = self.mix(F.pad(value.transpose(1, 2), (3, 0))).transpose(1, 2)
        x_BTD = x_BTD + self.leave(mixed * torch.sigmoid(gate))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))


class MixerLanguageModel(nn.Module):
    """Tokens to logits."""

    def __init__(self, vocab: int, dim: int, num_layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(MixerBlock(dim) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.tokens(inputs)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def build_mixer(**args: Any) -> nn.Module:
    return MixerLanguageModel(**args)


class NoiseImages:
    """Images of noise with a label each."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, self.size, self.size, generator=generator)
        return {"inputs": image, "targets": index % 10}


def images(split: str, *, size: int) -> NoiseImages | None:
    return NoiseImages(size) if split == "train" else None
