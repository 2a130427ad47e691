"""Attention with grouped queries: causal, within documents, within a sliding window, or between all
tokens.

Shape suffixes: B batch, T sequence, D model width, H query heads, K key/value heads, E head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from phalanx.core.block_sizes import get_block_sizes
from phalanx.core.deprecated import warn_renamed
from phalanx.job.shapes.transformer import TransformerShape
from phalanx.mesh.attend import compute_attention
from phalanx.mesh.attend_blocks import compute_attention_by_blocks, is_any_key_masked
from phalanx.nn.norms import RMSNorm
from phalanx.nn.rotary import rotate


def make_attention_mask(
    num_tokens: int,
    window: int,
    document_ids_BT: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    causal: bool = True,
) -> torch.Tensor | None:
    """[B or 1, 1, T, T]: 0 where a token attends to another, -inf where not.

    None: to all, or all before, unmasked.

    A window of w holds a token and the w - 1 before it; where it is not causal, the w - 1 after it,
    too. One mask serves all blocks that attend alike. It is in the compute type: kernels would turn
    booleans into that, a copy for every block that autograd keeps.
    """
    if not is_any_key_masked(num_tokens, window, document_ids_BT):
        return None
    keep = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device)
    if causal:
        keep = keep.tril()
    if 0 < window < num_tokens:
        # The second cut is for masks that are not causal: a causal one has nothing left there.
        keep = keep.triu(1 - window).tril(window - 1)
    keep = keep[None]
    if document_ids_BT is not None:
        keep = keep & (document_ids_BT[:, :, None] == document_ids_BT[:, None, :])
    return torch.zeros(keep.shape, dtype=dtype, device=device).masked_fill_(~keep, -torch.inf)[
        :, None
    ]


def make_shared_attention_mask(
    num_tokens: int,
    window: int,
    document_ids_BT: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    causal: bool = True,
) -> torch.Tensor | None:
    """attention_mask for all blocks of a model, where it is small.

    None for a sequence of more tokens than a block of queries: AttentionCore, which is given
    window and documents, too, then makes masks of a block of queries at a time.
    """
    # A mask of all pairs grows with the square of the length: those of a block of queries are
    # cheaper to make again in each layer than this one is to keep.
    if num_tokens > get_block_sizes().query_block:
        return None
    return make_attention_mask(num_tokens, window, document_ids_BT, dtype, device, causal=causal)


# It takes the mask besides window and documents, because these give the same mask in every block:
# the model makes it once. A core that makes its own (flash, ring) uses window and document ids
# instead.
class AttentionCore(nn.Module):
    """Softmax attention. `document_ids` (or None) keeps documents from seeing each other.

    `mask` is attention_mask of the same window, documents and direction, where the model made it
    for several blocks. Without one, memory grows with the sequence's length and not with its
    square.
    """

    def __init__(self, *, causal: bool = True, window: int = 0) -> None:
        super().__init__()
        self.causal, self.window = causal, window

    def forward(
        self,
        q_BHTE: torch.Tensor,
        k_BKTE: torch.Tensor,
        v_BKTE: torch.Tensor,
        positions_BT: torch.Tensor | None,
        document_ids_BT: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_tokens = q_BHTE.shape[2]
        if (
            mask is None
            and num_tokens > get_block_sizes().query_block
            and is_any_key_masked(num_tokens, self.window, document_ids_BT)
        ):
            window, is_causal = self.window, self.causal
            return compute_attention_by_blocks(
                q_BHTE, k_BKTE, v_BKTE, document_ids_BT, window=window, is_causal=is_causal
            )
        if mask is None:
            mask = make_attention_mask(
                num_tokens,
                self.window,
                document_ids_BT,
                q_BHTE.dtype,
                q_BHTE.device,
                causal=self.causal,
            )
        return compute_attention(q_BHTE, k_BKTE, v_BKTE, mask, is_causal=self.causal)


class Attention(nn.Module):
    # To q, k and v, which tensor parallelism may then enter together.
    input_goes_to_columns_alone = True

    def __init__(self, shape: TransformerShape, window: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        into, bias = shape.bias != "none", shape.bias == "all"
        self.q = nn.Linear(shape.dim, shape.num_heads * shape.head_dim, bias=into)
        self.k = nn.Linear(shape.dim, shape.num_kv_heads * shape.head_dim, bias=into)
        self.v = nn.Linear(shape.dim, shape.num_kv_heads * shape.head_dim, bias=into)
        self.o = nn.Linear(shape.num_heads * shape.head_dim, shape.dim, bias=bias)
        self.q_norm = self._build_head_norm(shape)
        self.k_norm = self._build_head_norm(shape)
        self.core = AttentionCore(causal=shape.is_causal, window=window)

    @staticmethod
    def _build_head_norm(shape: TransformerShape) -> RMSNorm | None:
        if not shape.qk_norm:
            return None
        return RMSNorm(shape.head_dim, shape.norm_eps, shape.norm_plus_one)

    def forward(
        self,
        x_BTD: torch.Tensor,
        table: torch.Tensor | None,
        positions_BT: torch.Tensor | None,
        document_ids_BT: torch.Tensor | None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # -1, because a rank of tensor parallelism has a part of the heads.
        q, k, v = (
            linear(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if table is not None:
            q, k = rotate(q, table), rotate(k, table)
        out_BHTE = self.core(q, k, v, positions_BT, document_ids_BT, mask)
        return self.o(out_BHTE.transpose(1, 2).flatten(2))


def __getattr__(name: str) -> Any:
    # What a model of one's own imported until 0.1.
    if name == "shared_mask":
        warn_renamed("nn.attention.shared_mask", "nn.attention.make_shared_attention_mask")
        return make_shared_attention_mask
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
