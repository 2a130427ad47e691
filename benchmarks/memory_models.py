"""Modules and data of someone's own for `benchmarks/memory_truth.py`: the plan sees of them what it
sees of any user's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class PlainAttention(nn.Module):
    """Causal attention written out: it keeps its scores."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x_BTD.shape
        heads = self.qkv(x_BTD).view(batch, length, 3, self.num_heads, dim // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (dim // self.num_heads) ** 0.5
        future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class PlainBlock(nn.Module):
    """A pre-norm block with a GELU feed-forward."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = PlainAttention(dim, num_heads)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainLanguageModel(nn.Module):
    """Tokens to logits, with learned positions and a head of its own."""

    def __init__(self, vocab: int, dim: int, num_layers: int, num_heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.layers = nn.ModuleList(PlainBlock(dim, num_heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1], device=inputs.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class GatedConvolution(nn.Module):
    """A causal depthwise convolution with a gate: a block without attention."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.enter, self.out = nn.Linear(dim, 4 * dim), nn.Linear(2 * dim, dim)
        self.mix = nn.Conv1d(2 * dim, 2 * dim, 4, groups=2 * dim)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        value, gate = self.enter(self.norm(x_BTD)).chunk(2, dim=-1)
        mixed = self.mix(F.pad(value.transpose(1, 2), (3, 0))).transpose(1, 2)
        return x_BTD + self.out(F.silu(mixed) * torch.sigmoid(gate))


class ConvolutionLanguageModel(nn.Module):
    """Tokens to logits through gated convolutions."""

    def __init__(self, vocab: int, dim: int, num_layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(GatedConvolution(dim) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.tokens(inputs)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def build_plain(**args: Any) -> nn.Module:
    return PlainLanguageModel(**args)


def build_convolution(**args: Any) -> nn.Module:
    return ConvolutionLanguageModel(**args)


class Images:
    """Images of noise with a label each."""

    def __init__(self, size: int, num_classes: int) -> None:
        self.size, self.num_classes = size, num_classes

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, self.size, self.size, generator=generator)
        return {"inputs": image, "targets": index % self.num_classes}


def images(split: str, *, size: int, num_classes: int) -> Images | None:
    return Images(size, num_classes) if split == "train" else None
