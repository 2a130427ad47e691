"""Modules as people write them, none of phalanx's own, with the sharding rules that tensor
parallelism needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import phalanx

VOCAB, DIM, HEADS, HEAD_DIM, SEQ_LEN = 251, 16, 4, 6, 8


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of [B, T, heads, E]; key heads serve as many query heads as there are more of those."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return out.transpose(1, 2)


class Separate(nn.Module):
    """q, k, v and o, grouped queries where there are fewer key heads, counts of heads in every
    view."""

    input_goes_to_columns_alone = True

    def __init__(
        self, num_kv_heads: int = HEADS, bias: bool = True, head_norm: bool = False
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, num_kv_heads, HEAD_DIM
        self.q = nn.Linear(DIM, HEADS * HEAD_DIM, bias)
        self.k = nn.Linear(DIM, num_kv_heads * HEAD_DIM, bias)
        self.v = nn.Linear(DIM, num_kv_heads * HEAD_DIM, bias)
        self.o = nn.Linear(HEADS * HEAD_DIM, DIM, bias)
        self.q_norm = nn.LayerNorm(HEAD_DIM) if head_norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        batch, length = q.shape[
            :2
        ]  # those of x may be of a part of the sequence, where columns enter it together
        q = self.q_norm(q.view(batch, length, self.num_heads, self.head_dim))
        k = self.k(x).view(batch, length, self.num_kv_heads, self.head_dim)
        v = self.v(x).view(batch, length, self.num_kv_heads, self.head_dim)
        return self.o(attend(q, k, v).reshape(batch, length, self.num_heads * self.head_dim))


class FusedGQA(nn.Module):
    """One matrix of all queries, then all keys, then all values; sizes are kept as features."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = HEADS, 2
        self.q_size, self.kv_size = HEADS * HEAD_DIM, 2 * HEAD_DIM
        self.qkv = nn.Linear(DIM, self.q_size + 2 * self.kv_size)
        self.o = nn.Linear(self.q_size, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q = q.unflatten(-1, (self.num_heads, HEAD_DIM))
        k, v = (y.unflatten(-1, (self.num_kv_heads, HEAD_DIM)) for y in (k, v))
        return self.o(attend(q, k, v).flatten(2))


class InterleavedGroups(nn.Module):
    """Per KV group its queries, its key and its value, as in Falcon and InternLM 2."""

    def __init__(self) -> None:
        super().__init__()
        self.num_groups, self.per_group = 2, HEADS // 2
        self.wqkv = nn.Linear(DIM, self.num_groups * (self.per_group + 2) * HEAD_DIM, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.wqkv(x).unflatten(-1, (self.num_groups, self.per_group + 2, HEAD_DIM))
        q, k, v = qkv[..., : self.per_group, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]
        return self.wo(attend(q, k, v).flatten(2))


class InterleavedHeads(nn.Module):
    """Per head its query, key and value, as in GPT-NeoX."""

    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads = HEADS
        self.query_key_value = nn.Linear(DIM, 3 * HEADS * HEAD_DIM)
        self.dense = nn.Linear(HEADS * HEAD_DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.query_key_value(x).unflatten(-1, (self.num_attention_heads, 3 * HEAD_DIM))
        return self.dense(attend(*qkv.split(HEAD_DIM, dim=-1)).flatten(2))


class Conv1D(nn.Module):
    """As in transformers: the weight is [inputs, outputs]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = (
            nn.Parameter(0.1 * torch.randn(nx, nf)),
            nn.Parameter(0.1 * torch.randn(nf)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(
            *x.size()[:-1], self.nf
        )


class GPT2Attention(nn.Module):
    input_goes_to_columns_alone = True

    def __init__(self) -> None:
        super().__init__()
        self.embed_dim, self.split_size, self.head_dim = (
            HEADS * HEAD_DIM,
            HEADS * HEAD_DIM,
            HEAD_DIM,
        )
        self.c_attn, self.c_proj = Conv1D(3 * self.embed_dim, DIM), Conv1D(DIM, self.embed_dim)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        q, k, v = self.c_attn(hidden_states).split(self.split_size, dim=2)
        q, k, v = (y.view(*y.shape[:-1], -1, self.head_dim) for y in (q, k, v))
        return self.c_proj(attend(q, k, v).flatten(2))


class FusedGate(nn.Module):
    """Gate and up in one matrix."""

    input_goes_to_columns_alone = True

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(DIM, 2 * 22), nn.Linear(22, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class NormedInside(nn.Module):
    """A norm before the columns and one after the row, both in what a rule names a region."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.fc1, self.fc2 = nn.Linear(DIM, 23), nn.Linear(23, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.fc2(F.gelu(self.fc1(self.before(x)))))


class Residual(nn.Module):
    """A norm, something, and the way around it: no region, for its input goes around the
    matrices, too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(DIM), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


class MLP(nn.Module):
    def __init__(self, size: int = DIM, width: int = 23) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(size, width), nn.Linear(width, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class MixerBlock(nn.Module):
    """Of an MLP-Mixer: one product over the tokens, one over the features, both with the
    residual inside."""

    def __init__(self) -> None:
        super().__init__()
        self.token_norm, self.channel_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.tokens, self.channels = MLP(SEQ_LEN, 10), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.token_norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.channel_norm(x))


class Lm(nn.Module):
    """An embedding, blocks, a norm, a head. `scale` is a parameter that no rule covers."""

    def __init__(
        self,
        make_block: Callable[[], nn.Module],
        rules: Mapping[str, str] | None = None,
        *,
        tied: bool = False,
        in_a_dict: bool = False,
        frozen: tuple[str, ...] = (),
        per_token: bool = False,
        num_blocks: int = 2,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([make_block() for _ in range(num_blocks)])
        self.scale = nn.Parameter(torch.ones(DIM))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.in_a_dict = in_a_dict
        self.is_per_token_outside_regions = per_token
        if rules is not None:
            self.shard_rules = dict(rules)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x * self.scale))
        return {"logits": logits} if self.in_a_dict else logits


def dict_objective(
    outputs: Any, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    targets = batch["targets"].flatten()
    loss = F.cross_entropy(
        outputs["logits"].flatten(0, 1), targets, ignore_index=-100, reduction="sum"
    )
    return loss, (targets != -100).sum()


def _residual(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Residual(make())


ENDS = {"embed": "vocab", "head": "vocab"}
MLP_RULES = {"layers.*.inner.fc1": "column", "layers.*.inner.fc2": "row"}


def separate_rules(num_kv_heads: int = HEADS) -> dict[str, str]:
    keys = f"column heads={num_kv_heads}/{HEADS}"
    return {
        "layers.*.inner": "region divide=num_heads,num_kv_heads",
        "layers.*.inner.q": f"column heads={HEADS}",
        "layers.*.inner.k": keys,
        "layers.*.inner.v": keys,
        "layers.*.inner.o": f"row heads={HEADS}",
    }


def mixer() -> nn.Module:
    rules = {
        "layers.*.tokens.fc1": "column",
        "layers.*.tokens.fc2": "row",
        "layers.*.channels.fc1": "column",
        "layers.*.channels.fc2": "row",
    }
    return Lm(MixerBlock, rules)


def attention() -> nn.Module:
    return Lm(_residual(Separate), separate_rules() | ENDS)


def attention_per_token() -> nn.Module:
    return Lm(_residual(Separate), separate_rules() | ENDS, per_token=True)


class DroppedBehind(nn.Module):
    """Dropout of what the row puts out, in the region, as GPT-2 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.drop = nn.Linear(DIM, 23), nn.Linear(23, DIM), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.fc2(F.gelu(self.fc1(x))))


def dropout() -> nn.Module:
    return Lm(_residual(DroppedBehind), MLP_RULES | {"layers.*.inner": "region"} | ENDS)


def gqa() -> nn.Module:
    return Lm(_residual(lambda: Separate(2)), separate_rules(2) | ENDS, tied=True)


def gqa_per_token() -> nn.Module:
    return Lm(
        _residual(lambda: Separate(2, head_norm=True)),
        separate_rules(2) | ENDS,
        tied=True,
        per_token=True,
    )


def head_norm() -> nn.Module:
    """A norm of each head's queries, in a region: its gradient is partial without a word."""
    return Lm(_residual(lambda: Separate(2, bias=False, head_norm=True)), separate_rules(2))


def head_norm_without_region() -> nn.Module:
    rules = separate_rules() | {"layers.*.inner.q_norm": "partial"}
    rules["layers.*.inner"] = "replicate"
    block = _residual(lambda: _Relative(HEADS, head_norm=True))
    return Lm(block, rules)


class _Relative(Separate):
    """Its views count no heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, HEAD_DIM)) for linear in (self.q, self.k, self.v))
        return self.o(attend(self.q_norm(q), k, v).flatten(2))


def fused_gqa() -> nn.Module:
    rules = {
        "layers.*.inner": f"region divide=num_heads,num_kv_heads/{2},q_size,kv_size/2",
        "layers.*.inner.qkv": f"column heads={HEADS}+2/{HEADS}+2/{HEADS}",
        "layers.*.inner.o": f"row heads={HEADS}",
    }
    return Lm(_residual(FusedGQA), rules | ENDS, per_token=True, frozen=("head.weight",))


def interleaved_groups() -> nn.Module:
    rules = {
        "layers.*.inner": "region divide=num_groups",
        "layers.*.inner.wqkv": "column heads=2",
        "layers.*.inner.wo": "row heads=2",
    }
    return Lm(_residual(InterleavedGroups), rules)


def interleaved_heads() -> nn.Module:
    rules = {
        "layers.*.inner": "region divide=num_attention_heads",
        "layers.*.inner.query_key_value": f"column heads={HEADS}",
        "layers.*.inner.dense": f"row heads={HEADS}",
    }
    return Lm(_residual(InterleavedHeads), rules)


def conv1d() -> nn.Module:
    rules = {
        "layers.*.inner": "region divide=split_size",
        "layers.*.inner.c_attn": f"column heads={HEADS}+{HEADS}+{HEADS}",
        "layers.*.inner.c_proj": f"row heads={HEADS}",
    }
    return Lm(_residual(GPT2Attention), rules | ENDS, tied=True)


def fused_gate() -> nn.Module:
    rules = {
        "layers.*.inner": "region",
        "layers.*.inner.gate_up": "column parts=2",
        "layers.*.inner.down": "row",
    }
    return Lm(_residual(FusedGate), rules | ENDS, per_token=True, tied=True)


def normed_inside() -> nn.Module:
    rules = {
        "layers.*.inner": "region",
        "layers.*.inner.fc1": "column",
        "layers.*.inner.fc2": "row",
        "layers.*.inner.after": "replicate",
    }
    return Lm(_residual(NormedInside), rules | ENDS)


def normed_inside_per_token() -> nn.Module:
    module = normed_inside()
    module.is_per_token_outside_regions = True  # type: ignore[assignment]
    return module


def dict_head() -> nn.Module:
    rules = {"embed": "vocab", "head": "column gather"}
    return Lm(_residual(MLP), MLP_RULES | rules, in_a_dict=True, tied=True)


def dict_head_per_token() -> nn.Module:
    """The embedding stays whole, and a rank goes on with its part of the sequence."""
    rules = {"embed": "sequence", "head": "column gather"}
    return Lm(_residual(MLP), MLP_RULES | rules, in_a_dict=True, per_token=True)


def frozen_parts() -> nn.Module:
    return Lm(
        _residual(MLP), MLP_RULES | ENDS, frozen=("fc1.weight", "fc2.bias", "norm.weight", "embed")
    )


@phalanx.shard_rules(MLP_RULES)
def by_decorated_factory() -> nn.Module:
    return Lm(_residual(MLP))


@phalanx.shard_rules({"": "region", "fc1": "column", "fc2": "row"})
class RuledMLP(MLP):
    """A part of a model that brings its own rules; the empty name is itself."""


def by_its_parts() -> nn.Module:
    return Lm(_residual(RuledMLP), ENDS)


@phalanx.shard_rules({**MLP_RULES, **ENDS})
class DecoratedLm(Lm):
    def __init__(self) -> None:
        super().__init__(_residual(MLP), per_token=True)


def without_rules() -> nn.Module:
    return Lm(_residual(MLP))


RULED: dict[str, tuple[int, ...]] = {  # name -> degrees of tp it can have
    "mixer": (2, 4),
    "attention": (2, 4),
    "attention_per_token": (2, 4),
    "dropout": (2, 4),
    "gqa": (2, 4),
    "gqa_per_token": (2, 4),
    "head_norm": (2, 4),
    "head_norm_without_region": (2, 4),
    "fused_gqa": (2, 4),
    "interleaved_groups": (2,),
    "interleaved_heads": (2, 4),
    "conv1d": (2, 4),
    "fused_gate": (2, 4),
    "normed_inside": (2, 4),
    "normed_inside_per_token": (2, 4),
    "dict_head": (2, 4),
    "dict_head_per_token": (2, 4),
    "frozen_parts": (2, 4),
    "by_decorated_factory": (2, 4),
    "by_its_parts": (2, 4),
    "DecoratedLm": (2, 4),
}
