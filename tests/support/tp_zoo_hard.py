"""Modules of which a part must stay whole, or that can only be cut with care: what
`--suggest-rules` is tried on."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tp_zoo import DIM, HEAD_DIM, HEADS, MLP, SEQ_LEN, Lm, Residual, Separate, attend


class PositionBias(Separate):
    """A table of each head, as T5's: half the heads have no use for all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(0.1 * torch.randn(HEADS, SEQ_LEN, SEQ_LEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        return self.o(
            F.scaled_dot_product_attention(q, k, v, attn_mask=self.table).transpose(1, 2).flatten(2)
        )


class HeadTemperature(Separate):
    """A number of each head, which broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.rand(HEADS, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, HEAD_DIM)) for linear in (self.q, self.k, self.v))
        return self.o(attend(q * self.temperature, k, v).flatten(2))


class TalkingHeads(Separate):
    """Heads see each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, HEAD_DIM)) for linear in (self.q, self.k, self.v))
        out = attend(q, k, v)
        return self.o((out + out.mean(dim=2, keepdim=True)).flatten(2))


class Scaled(nn.Module):
    """Something of the hidden width between column and row."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.fc1, self.between, self.fc2 = nn.Linear(DIM, 24), make(24), nn.Linear(24, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.between(F.gelu(self.fc1(x))))


class Gamma(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


class Number(nn.Module):
    """One learned number: each rank puts its part through it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.rand(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.slope


class Tokens(nn.Module):
    """BatchNorm over features, which come last here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class FlatBlock(nn.Module):
    """All of a block in one module, with both residuals, a norm of each head, and a learned
    number on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.norm1, self.norm2 = HEADS, nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.q_norm = nn.LayerNorm(DIM // HEADS)
        self.up, self.gate, self.down = nn.Linear(DIM, 21), nn.Linear(DIM, 21), nn.Linear(21, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (y.view(*y.shape[:2], self.n_head, -1) for y in (q, k, v))
        x = x + self.proj(attend(self.q_norm(q), k, v).flatten(2))
        hidden = self.norm2(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class GatedOutput(nn.Module):
    """What the row puts out is multiplied by a gate of the input: the input goes around the row."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.gate = nn.Linear(DIM, 24), nn.Linear(24, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x))) * torch.sigmoid(self.gate(x))


class Chain(nn.Module):
    """Three in a row: two make a pair, the third is left."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(DIM, 30), nn.Linear(30, 22), nn.Linear(22, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(F.relu(self.two(F.relu(self.one(x)))))


class Twice(nn.Module):
    """The same layers again."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, 24), nn.Linear(24, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.fc2(F.gelu(self.fc1(x)))
        return x


class Peeks(nn.Module):
    """What a column puts out is looked at by others than its row."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, 24), nn.Linear(24, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.fc1(x))
        return self.fc2(hidden) * hidden.mean(dim=-1, keepdim=True)


class Experts(nn.Module):
    """Every token visits the experts that a router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 18), nn.SiLU(), nn.Linear(18, DIM)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weight * (chosen == number)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        return out


class ByWeight(nn.Module):
    """Its matrices are used, its layers never called."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, 24), nn.Linear(24, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, self.fc1.weight)), self.fc2.weight)


class Windowed(Separate):
    """Counts its features in what it divides by, which is no view: a scale that must not be one
    rank's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_dim = HEADS * HEAD_DIM

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            linear(x).view(*x.shape[:2], self.num_heads, -1) for linear in (self.q, self.k, self.v)
        )
        return self.o(attend(q / self.embed_dim**0.5, k, v).flatten(2))


class Settings:
    """What all blocks share."""

    num_layers, dim = 2, DIM

    def __init__(self) -> None:
        self.num_heads, self.num_kv_heads = HEADS, 2


class BySettings(nn.Module):
    """Heads are counted by what all blocks share; a slice that is too long says nothing."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.qkv, self.o = nn.Linear(DIM, (HEADS + 4) * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv, border = self.qkv(x), self.settings.num_heads * HEAD_DIM
        width = self.settings.num_kv_heads * HEAD_DIM
        q, k, v = qkv[..., :border], qkv[..., border : border + width], qkv[..., border + width :]
        q, k, v = (y.unflatten(-1, (-1, HEAD_DIM)) for y in (q, k, v))
        return self.o(attend(q, k, v).flatten(2))


def _lm(make: Callable[[], nn.Module], **options: bool) -> Callable[[], nn.Module]:
    return lambda: Lm(lambda: Residual(make()), **options)  # type: ignore[arg-type]


position_bias, head_temperature, talking_heads = (
    _lm(PositionBias),
    _lm(HeadTemperature),
    _lm(TalkingHeads),
)
gamma, layer_norm, batch_norm = (
    _lm(lambda: Scaled(Gamma)),
    _lm(lambda: Scaled(nn.LayerNorm)),
    _lm(lambda: Scaled(Tokens)),
)
number, gated_output, chain, twice = (
    _lm(lambda: Scaled(Number)),
    _lm(GatedOutput),
    _lm(Chain),
    _lm(Twice),
)
peeks, experts, by_weight, windowed = _lm(Peeks), _lm(Experts), _lm(ByWeight), _lm(Windowed)


def by_settings() -> nn.Module:
    settings = Settings()
    return Lm(lambda: Residual(BySettings(settings)))


def flat() -> nn.Module:
    return Lm(FlatBlock, tied=True)


def encoder() -> nn.Module:
    """torch's own layer: its attention stays whole."""
    return Lm(lambda: nn.TransformerEncoderLayer(DIM, 4, 22, 0.0, batch_first=True))


class DroppedMLP(MLP):
    """Drops before its columns and behind its row, once by a layer and once without one."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(super().forward(F.dropout(x, 0.1, self.training)))


def dropped_around() -> nn.Module:
    return Lm(lambda: Residual(DroppedMLP()))


def dropping() -> nn.Module:
    return Lm(lambda: Residual(Scaled(lambda width: nn.Dropout(0.1))))
