"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values come of
one narrow latent.

Of each key one part is made of the latent, head by head, and one is rotated, made of the input, and
all heads' alike. A query's parts are in the same order. Names are phalanx's; weights and rotated
pairs lie as in DeepSeek's published models, so that exchange renames and moves nothing.

Shape suffixes: B batch, T sequence, D model width, H heads, E head width (R of it rotated), L
latent, V value width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from phalanx.job.shapes.decoder import DecoderShape
from phalanx.nn.attention import AttentionCore
from phalanx.nn.norms import RMSNorm
from phalanx.nn.rotary import compute_yarn_factor, rotate_neighbouring_pairs

# Of the latents' norms: DeepSeek's code takes this whatever the other norms have.
LATENT_NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """`query_rank` of the shape 0: queries are projected at once, as in DeepSeek-V2-Lite.

    Under tensor parallelism a rank makes whole latents and its own heads of them.
    """

    def __init__(self, shape: DecoderShape, window: int) -> None:
        super().__init__()
        assert 0 < shape.rope_head_dim < shape.head_dim, "validated with the job"
        assert 0 < shape.value_head_dim <= shape.head_dim, "validated with the job"
        self.head_dim, self.value_dim = shape.head_dim, shape.value_head_dim
        self.parts = (shape.head_dim - shape.rope_head_dim, shape.rope_head_dim)
        self.kv_rank = shape.kv_rank
        queries = shape.num_heads * shape.head_dim
        self.q: nn.Linear | None = None
        if not shape.query_rank:
            self.q = nn.Linear(shape.dim, queries, bias=False)
        else:
            self.q_down = nn.Linear(shape.dim, shape.query_rank, bias=False)
            self.q_norm = RMSNorm(shape.query_rank, LATENT_NORM_EPS, shape.norm_plus_one)
            self.q_up = nn.Linear(shape.query_rank, queries, bias=False)
        self.kv_down = nn.Linear(shape.dim, shape.kv_rank + shape.rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(shape.kv_rank, LATENT_NORM_EPS, shape.norm_plus_one)
        self.kv_up = nn.Linear(
            shape.kv_rank, shape.num_heads * (self.parts[0] + self.value_dim), bias=False
        )
        self.o = nn.Linear(shape.num_heads * self.value_dim, shape.dim, bias=False)
        self.core = AttentionCore(window=window)
        # YaRN's temperature is on whole queries and keys here, not on their rotated parts alone
        # (DeepSeek-V2's code).
        # Squared, because it is on queries alone: scores get the factor of both.
        self.query_scale = compute_yarn_factor(shape, local=window > 0) ** 2

    def forward(
        self,
        x_BTD: torch.Tensor,
        table: torch.Tensor | None,
        positions_BT: torch.Tensor | None,
        document_ids_BT: torch.Tensor | None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert table is not None, "positions are rotary: validated with the job"
        q_BHTE = self._project_queries(x_BTD, table)
        k_BHTE, v_BHTV = self._project_keys_and_values(x_BTD, table)
        # Values as wide as keys: with others torch has no kernel for CPUs but the one that keeps T
        # x T scores, and context parallelism (ring, all-gather) sends keys and values as one
        # tensor. So the core's seam has one width. Zeros add nothing to the part that is taken.
        v_BHTE = F.pad(v_BHTV, (0, self.head_dim - self.value_dim))
        out_BHTE = self.core(q_BHTE, k_BHTE, v_BHTE, positions_BT, document_ids_BT, mask)
        return self.o(out_BHTE[..., : self.value_dim].transpose(1, 2).flatten(2))

    def _project_queries(self, x_BTD: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q = self.q_up(self.q_norm(self.q_down(x_BTD))) if self.q is None else self.q(x_BTD)
        heads = q.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        plain, rotated = heads.split(self.parts, dim=-1)
        q_BHTE = torch.cat((plain, rotate_neighbouring_pairs(rotated, table)), dim=-1)
        if self.query_scale == 1:
            return q_BHTE
        return q_BHTE * self.query_scale

    def _project_keys_and_values(
        self, x_BTD: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        latent_BTL, shared_BTR = self.kv_down(x_BTD).split((self.kv_rank, self.parts[1]), dim=-1)
        both = self.kv_up(self.kv_norm(latent_BTL)).unflatten(
            -1, (-1, self.parts[0] + self.value_dim)
        )
        plain, v_BHTV = both.transpose(1, 2).split((self.parts[0], self.value_dim), dim=-1)
        shared = rotate_neighbouring_pairs(shared_BTR[:, None], table).expand(
            -1, plain.shape[1], -1, -1
        )
        return torch.cat((plain, shared), dim=-1), v_BHTV
