"""Scaled dot-product attention of grouped queries, without a copy of keys and values for each query
head.

Shape suffixes: B batch, H query heads, K key/value heads, T queries, S keys, E head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from phalanx.mesh.devices import is_on_cpu

# The types that flash attention computes in on CUDA.
CUDA_FLASH_DTYPES = (torch.bfloat16, torch.float16)
# The widest head that flash attention takes on CUDA.
MAX_CUDA_FLASH_HEAD_DIM = 256


def compute_attention(
    q_BHTE: torch.Tensor,
    k_BKSE: torch.Tensor,
    v_BKSE: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
) -> torch.Tensor:
    """[B, H, T, E].

    `mask`: [B or 1, 1, T, S], added to the scores; with one, `is_causal` is not looked at.
    """
    groups = q_BHTE.shape[1] // k_BKSE.shape[1]
    is_grouped = groups > 1 and can_kernel_use_fewer_key_heads(q_BHTE, mask)
    if groups > 1 and not is_grouped:
        k_BKSE, v_BKSE = (
            repeat_key_value_heads(k_BKSE, groups),
            repeat_key_value_heads(v_BKSE, groups),
        )
    return F.scaled_dot_product_attention(
        q_BHTE,
        k_BKSE,
        v_BKSE,
        attn_mask=mask,
        # Torch refuses a mask together with is_causal.
        is_causal=is_causal and mask is None,
        enable_gqa=is_grouped,
    )


def can_kernel_use_fewer_key_heads(q_BHTE: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """True if a kernel that keeps no scores takes fewer heads of keys than of queries.

    On CUDA flash attention does; the one that takes masks and fp32 does not, and torch would fall
    back to products that keep T x S scores.
    """
    if is_on_cpu(q_BHTE):
        return True
    width = q_BHTE.shape[-1]
    return (
        mask is None
        and q_BHTE.dtype in CUDA_FLASH_DTYPES
        and width % 8 == 0
        and width <= MAX_CUDA_FLASH_HEAD_DIM
    )


def repeat_key_value_heads(x_BKSE: torch.Tensor, groups: int) -> torch.Tensor:
    """[B, H, S, E]: each head of keys or values for all queries of its group."""
    return x_BKSE.repeat_interleave(groups, dim=1)
