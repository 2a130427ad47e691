"""A module and a dataset with a bottleneck inside, for `benchmarks/bottlenecks.py`.

The delay is real: the processor spins, or the thread sleeps, on one rank or on all.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

SEQ_LEN, VOCAB = 128, 512


def delay(seconds: float, *, is_busy: bool) -> None:
    """Spin or sleep for so long."""
    if not is_busy:
        time.sleep(seconds)
        return
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def is_on_rank(rank: int) -> bool:
    """True on that rank, on all for -1."""
    return rank in (-1, int(os.environ.get("RANK", "0")))


class _DelayBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float, is_busy: bool) -> torch.Tensor:  # type: ignore[override]
        ctx.seconds, ctx.is_busy = seconds, is_busy
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        delay(ctx.seconds, is_busy=ctx.is_busy)
        return gradient, None, None


class Block(nn.Module):
    """A gated causal convolution and a feed-forward."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.enter, self.leave = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.enter(self.norm1(x)).chunk(2, dim=-1)
        x = x + self.leave(value * torch.sigmoid(gate))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class DelayedModel(nn.Module):
    """Tokens to logits; every second block is late by its share of `seconds` a microbatch, on
    `rank`, in its forward or backward (`where`). Its table has `num_rows`, of which VOCAB are
    read."""

    def __init__(
        self,
        dim: int,
        num_layers: int,
        where: str,
        rank: int,
        seconds: float,
        is_busy: bool,
        num_rows: int,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_rows, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        self.where, self.rank, self.is_busy = where, rank, is_busy
        self.seconds = seconds / max(num_layers // 2, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.tokens(inputs)
        for number, layer in enumerate(self.layers):
            if number % 2 and is_on_rank(self.rank):
                if self.where == "forward":
                    delay(self.seconds, is_busy=self.is_busy)
                elif self.where == "backward":
                    x = _DelayBackward.apply(x, self.seconds, self.is_busy)
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def build(
    dim: int = 192,
    num_layers: int = 6,
    where: str = "",
    rank: int = -1,
    seconds: float = 0.0,
    is_busy: bool = True,
    num_rows: int = VOCAB,
) -> nn.Module:
    return DelayedModel(dim, num_layers, where, rank, seconds, is_busy, num_rows)


class Tokens:
    """Random sequences; reading one takes `seconds`, on `rank`."""

    def __init__(self, rank: int, seconds: float, is_busy: bool) -> None:
        self.rank, self.seconds, self.is_busy = rank, seconds, is_busy

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.seconds and is_on_rank(self.rank):
            delay(self.seconds, is_busy=self.is_busy)
        tokens = np.random.default_rng(index).integers(0, VOCAB, SEQ_LEN + 1)
        return {"inputs": tokens[:-1], "targets": tokens[1:]}


def dataset(
    split: str, rank: int = -1, seconds: float = 0.0, is_busy: bool = False
) -> Tokens | None:
    if split == "held_out":
        return None
    return Tokens(rank, seconds, is_busy)
