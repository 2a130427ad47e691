"""Attention as a sum over blocks of keys: each block's own softmax, merged by log-sum-exp; and its
gradients.

Shape suffixes: B batch, H query heads, K key/value heads, T this rank's tokens, S a block's keys, E
head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx.mesh.attend import repeat_key_value_heads
from phalanx.mesh.attention_kernels import AttentionKernel, choose_attention_kernel


@dataclass
class OnlineSoftmaxOutput:
    """Attention over the blocks so far: `out` [B, H, T, E] and its `lse` [B, H, T], in at least
    fp32."""

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def make_empty(cls, q_BHTE: torch.Tensor) -> OnlineSoftmaxOutput:
        wide = torch.promote_types(q_BHTE.dtype, torch.float32)
        out = torch.zeros(q_BHTE.shape, dtype=wide, device=q_BHTE.device)
        return cls(out, torch.full(q_BHTE.shape[:-1], -torch.inf, dtype=wide, device=q_BHTE.device))

    def merge_block(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge a block for the queries `rows`: each side's weight is its share of the common
        denominator."""
        old, new = self.lse[:, :, rows], torch.logaddexp(self.lse[:, :, rows], lse)
        # Queries that have seen nothing yet have shares of zero: -inf - -inf would be NaN.
        new_lse = new.where(new > -torch.inf, 0.0)
        old_weight, added = (old - new_lse).exp().unsqueeze(-1), (lse - new_lse).exp().unsqueeze(-1)
        self.out[:, :, rows] = self.out[:, :, rows] * old_weight + out * added
        self.lse[:, :, rows] = new


@dataclass
class BlockAttention:
    """This rank's queries [B, H, T, E] against blocks of keys and values [2, B, K, S, E]."""

    q: torch.Tensor

    def forward(self, running: OnlineSoftmaxOutput, block: KeyValueBlock) -> None:
        q = self.q[:, :, block.rows]
        kernel = choose_attention_kernel(q, block.mask)
        out, lse = kernel.forward(
            q, *self._slice_block_keys_and_values(block, kernel), block.mask, block.is_causal
        )
        # Kernels differ in what they return for a query that sees nothing.
        if block.mask is not None:
            blind = (block.mask == -torch.inf).all(-1)
            lse, out = lse.masked_fill(blind, -torch.inf), out.masked_fill(blind.unsqueeze(-1), 0.0)
        running.merge_block(block.rows, out, lse)

    def backward(
        self,
        grad: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        block: KeyValueBlock,
        grad_q: torch.Tensor,
        grad_kv: torch.Tensor,
    ) -> None:
        """Adds to `grad_q`, and to what the block's keys and values get: [2, B, K, S, E]; both
        are in at least fp32."""
        rows = block.rows
        q, grad, out, lse = (x[:, :, rows] for x in (self.q, grad, out, lse))
        kernel = choose_attention_kernel(q, block.mask)
        k, v = self._slice_block_keys_and_values(block, kernel)
        block_grad_q, *block_grad_kv = kernel.backward(
            grad, q, k, v, out, lse, block.mask, block.is_causal
        )
        grad_q[:, :, rows] += block_grad_q
        heads = block.kv.shape[2]
        for into, each in zip(grad_kv, block_grad_kv, strict=True):
            into[:, :, block.columns] += each.to(grad_q.dtype).unflatten(1, (heads, -1)).sum(2)

    def _slice_block_keys_and_values(
        self, block: KeyValueBlock, kernel: AttentionKernel
    ) -> tuple[torch.Tensor, torch.Tensor]:
        groups = self.q.shape[1] // block.kv.shape[2]
        k, v = block.kv[:, :, :, block.columns]
        if groups == 1 or kernel.takes_groups:
            return (k, v)
        return (repeat_key_value_heads(k, groups), repeat_key_value_heads(v, groups))


@dataclass(frozen=True)
class KeyValueBlock:
    """A block of keys and values, the rows and columns of it that meet, and their mask."""

    kv: torch.Tensor
    rows: slice
    columns: slice
    mask: torch.Tensor | None
    is_causal: bool
