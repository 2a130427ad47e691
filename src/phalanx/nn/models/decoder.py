"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shape suffixes: B batch, T sequence, D model width, H query heads, K key/value heads, E head width, F inner width,
V vocabulary. Seams that parallelism may swap: `attention.core(q, k, v, positions, document_ids)`, `embed`, the norms.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from phalanx.job.shape import ModelShape
from phalanx.mesh.logical import LogicalShard
from phalanx.nn.init import InitRule, initialize_shards
from phalanx.nn.objective import CausalOutput

STD = 0.02


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; the weight follows the input's type (fused kernels need that)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rotary_table(positions_BT: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> torch.Tensor:
    """[2, B, 1, T, E/2]: cosine and sine of position x frequency, in at least fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, dtype=wide, device=positions_BT.device) / head_dim
    angle_BTE = positions_BT[..., None].to(wide) * theta**-exponent
    return torch.stack((angle_BTE.cos(), angle_BTE.sin()))[:, :, None]


def rotate(x_BHTE: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate each (first half, second half) pair by its position's angle."""
    cos, sin = table
    first, second = x_BHTE.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BHTE.dtype)


class AttentionCore(nn.Module):
    """Causal softmax attention. `document_ids` (or None) keeps documents from seeing each other."""

    def forward(
        self,
        q_BHTE: torch.Tensor,
        k_BKTE: torch.Tensor,
        v_BKTE: torch.Tensor,
        positions_BT: torch.Tensor,
        document_ids_BT: torch.Tensor | None = None,
    ) -> torch.Tensor:
        groups = q_BHTE.shape[1] // k_BKTE.shape[1]
        if groups > 1:
            k_BKTE, v_BKTE = (x.repeat_interleave(groups, dim=1) for x in (k_BKTE, v_BKTE))
        if document_ids_BT is None:
            return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True)
        same = document_ids_BT[:, :, None] == document_ids_BT[:, None, :]
        causal = torch.ones(same.shape[-2:], dtype=torch.bool, device=same.device).tril()
        return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, attn_mask=(same & causal)[:, None])


class Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q = nn.Linear(shape.dim, shape.num_heads * shape.head_dim, bias=False)
        self.k = nn.Linear(shape.dim, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v = nn.Linear(shape.dim, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o = nn.Linear(shape.num_heads * shape.head_dim, shape.dim, bias=False)
        self.core = AttentionCore()

    def forward(
        self,
        x_BTD: torch.Tensor,
        table: torch.Tensor,
        positions_BT: torch.Tensor,
        document_ids_BT: torch.Tensor | None,
    ) -> torch.Tensor:
        q, k, v = (
            linear(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        out_BHTE = self.core(rotate(q, table), rotate(k, table), v, positions_BT, document_ids_BT)
        return self.o(out_BHTE.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    def __init__(self, shape: ModelShape, eps: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.dim, eps)
        self.attention = Attention(shape)
        self.ffn_norm = RMSNorm(shape.dim, eps)
        self.ffn = FeedForward(shape)

    def forward(
        self,
        x_BTD: torch.Tensor,
        table: torch.Tensor,
        positions_BT: torch.Tensor,
        document_ids_BT: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), table, positions_BT, document_ids_BT)
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class Decoder(nn.Module):
    """Tokens to hidden states; the objective owns the head (see CausalOutput)."""

    block_pattern = "blocks.*"  # what FSDP wraps, recompute recomputes and compile compiles

    block_inputs_are_cast = True  # the embedding's output is in the compute type, and so is all that follows

    def __init__(self, shape: ModelShape, *, rope_theta: float = 10000.0, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.shape, self.rope_theta = shape, rope_theta
        self.embed = nn.Embedding(shape.vocab_size, shape.dim)
        self.blocks = nn.ModuleList(Block(shape, norm_eps) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.dim, norm_eps)
        self.head = None if shape.tie_embeddings else nn.Linear(shape.dim, shape.vocab_size, bias=False)

    def forward(
        self, inputs: torch.Tensor, positions: torch.Tensor | None = None, document_ids: torch.Tensor | None = None
    ) -> CausalOutput:
        """inputs, positions, document_ids: [B, T] integers; positions default to 0..T-1."""
        if positions is None:
            positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
        x_BTD = self.embed(inputs)
        if torch.is_autocast_enabled(x_BTD.device.type):  # the residual stream in the compute type, as under FSDP
            x_BTD = x_BTD.to(torch.get_autocast_dtype(x_BTD.device.type))
        table = rotary_table(positions, self.shape.head_dim, self.rope_theta, x_BTD.dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD, table, positions, document_ids)
        head = self.embed.weight if self.head is None else self.head.weight
        return CausalOutput(self.norm(x_BTD), head)

    def initialize(self, shards: Mapping[str, LogicalShard], seed: int) -> None:
        """Fill this rank's shards. Projections back into the residual stream shrink with depth (GPT-2)."""
        residual = STD / (2 * self.shape.num_layers) ** 0.5
        rules = (
            InitRule("*norm.weight", constant=1.0),
            InitRule("*.attention.o.weight", std=residual),
            InitRule("*.ffn.down.weight", std=residual),
            InitRule("*", std=STD),
        )
        initialize_shards(shards, rules, seed)


def build(shape: ModelShape, *, rope_theta: float, norm_eps: float) -> Decoder:
    """The decoder of `shape`, on the current default device (phalanx builds on meta and initialises shards)."""
    return Decoder(shape, rope_theta=rope_theta, norm_eps=norm_eps)
