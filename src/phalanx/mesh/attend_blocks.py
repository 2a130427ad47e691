"""Attention with a mask of documents or of a window, whose memory grows with T x block and not with
T x T.

Queries are taken in blocks of rows, each against the keys that causality and the window let it
reach, with a mask of [rows, keys] that is made for this product alone. The backward makes each
block's mask again, so that autograd keeps queries, keys, values, the output and its log-sum-exp, as
it does without a mask.

Both directions are operators of torch's own kind: a compiler, which would unroll the blocks, and
selective recompute, which keeps the result, see one operation each, as with torch's attention.
Nothing here reads from the device: where documents end is known only there.

Shape suffixes: B batch, H query heads, K key/value heads, T tokens, S a block's keys, E head width.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.core.block_sizes import get_block_sizes
from phalanx.mesh.attend import repeat_key_value_heads
from phalanx.mesh.attention_kernels import AttentionKernel, choose_attention_kernel


def compute_attention_by_blocks(
    q_BHTE: torch.Tensor,
    k_BKTE: torch.Tensor,
    v_BKTE: torch.Tensor,
    document_ids_BT: torch.Tensor | None,
    *,
    window: int,
    is_causal: bool,
    block: int | None = None,
) -> torch.Tensor:
    """[B, H, T, E]: what `attend` computes with the mask of `window` (0: none) and documents,
    without that mask.

    `block`: queries at a time; None: as many as `get_block_sizes` says.
    """
    if block is None:
        block = get_block_sizes().query_block
    kind = q_BHTE.device.type
    # torch's own attention casts so, too; a custom operator has no cast of its own.
    if torch.is_autocast_enabled(kind) and q_BHTE.dtype is not torch.float64:
        low = torch.get_autocast_dtype(kind)
        q_BHTE, k_BKTE, v_BKTE = q_BHTE.to(low), k_BKTE.to(low), v_BKTE.to(low)
    out, _ = _attend_by_blocks(q_BHTE, k_BKTE, v_BKTE, document_ids_BT, window, is_causal, block)
    return out  # type: ignore[no-any-return]


def is_any_key_masked(num_tokens: int, window: int, document_ids_BT: torch.Tensor | None) -> bool:
    """True if a token of a sequence of `num_tokens` sees fewer than all tokens (before it)."""
    return document_ids_BT is not None or 0 < window < num_tokens


@dataclass(frozen=True)
class VisibleKeys:
    """The keys that a query of the same sequence sees: a window of w holds w tokens, itself among
    them."""

    document_ids_BT: torch.Tensor | None
    window: int
    is_causal: bool

    def visible_key_range(
        self, first: int, last: int, num_tokens: int = sys.maxsize
    ) -> tuple[int, int]:
        """The keys [begin, end) of all that queries [first, last) can see, whatever the
        documents are."""
        back = sys.maxsize
        if self.window > 0:
            back = self.window - 1
        if self.is_causal:
            return max(0, first - back), last
        return max(0, first - back), min(num_tokens, last + back)

    def build_additive_mask(
        self, first: int, last: int, start: int, end: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """[B or 1, 1, last - first, end - begin]: 0 where a query sees a key, -inf where not."""
        ids, shape, ahead = self.document_ids_BT, (1, last - first, end - start), first - start
        if ids is None:
            is_hidden = torch.zeros(shape, dtype=torch.bool, device=device)
        else:
            is_hidden = ids[:, first:last, None] != ids[:, None, start:end]
        # Query r and key c of the block are c - r - ahead tokens apart. Only the columns concerned
        # are gone through.
        if self.is_causal:
            _hide_columns_from_diagonal(is_hidden, ahead + 1)
        elif self.window > 0:
            _hide_columns_from_diagonal(is_hidden, ahead + self.window)
        if self.window > 0:
            _hide_columns_up_to_diagonal(is_hidden, ahead - self.window)
        return torch.zeros(is_hidden.shape, dtype=dtype, device=device).masked_fill_(
            is_hidden, -torch.inf
        )[:, None]


def _hide_columns_from_diagonal(is_hidden_BRC: torch.Tensor, diagonal: int) -> None:
    """Hides the columns c >= r + diagonal of each row r."""
    rows = is_hidden_BRC[:, :, max(0, diagonal) :]
    rows |= torch.ones(rows.shape[1:], dtype=torch.bool, device=rows.device).triu_(min(0, diagonal))


def _hide_columns_up_to_diagonal(is_hidden_BRC: torch.Tensor, diagonal: int) -> None:
    """Hides the columns c <= r + diagonal of each row r."""
    rows = is_hidden_BRC[:, :, : max(0, is_hidden_BRC.shape[1] + diagonal)]
    rows |= torch.ones(rows.shape[1:], dtype=torch.bool, device=rows.device).tril_(diagonal)


@dataclass(frozen=True)
class _QueryBlockWithVisibleKeys:
    """A block of queries, the keys that it reaches, and the mask between them."""

    rows: slice
    columns: slice
    mask: torch.Tensor


def _split_queries_into_blocks(
    q_BHTE: torch.Tensor, visible: VisibleKeys, block: int
) -> Iterator[_QueryBlockWithVisibleKeys]:
    """The blocks of a sequence. Without documents most have the same mask, which is made once."""
    num_tokens, last_shape, mask = q_BHTE.shape[2], None, torch.empty(0)
    for first in range(0, num_tokens, block):
        last = min(num_tokens, first + block)
        start, end = visible.visible_key_range(first, last, num_tokens)
        mask_shape = (last - first, first - start, end - start)
        if visible.document_ids_BT is not None or mask_shape != last_shape:
            # Frees the mask before, so that two never exist at once.
            mask, last_shape = torch.empty(0), mask_shape
            mask = visible.build_additive_mask(first, last, start, end, q_BHTE.dtype, q_BHTE.device)
        yield _QueryBlockWithVisibleKeys(slice(first, last), slice(start, end), mask)


def _choose_kernel_and_repeat_keys(
    q_BHTE: torch.Tensor, k_BKTE: torch.Tensor, v_BKTE: torch.Tensor
) -> tuple[AttentionKernel, torch.Tensor, torch.Tensor]:
    """The kernel for masked blocks, and keys and values with as many heads as it takes: repeated
    once for all blocks, and not kept."""
    kernel, groups = choose_attention_kernel(q_BHTE, q_BHTE), q_BHTE.shape[1] // k_BKTE.shape[1]
    if groups == 1 or kernel.takes_groups:
        return kernel, k_BKTE, v_BKTE
    return kernel, repeat_key_value_heads(k_BKTE, groups), repeat_key_value_heads(v_BKTE, groups)


def _ensure_contiguous_last_dim(x: torch.Tensor) -> torch.Tensor:
    """Kernels read along the last dimension."""
    if x.stride(-1) == 1:
        return x
    return x.contiguous()


_TENSOR_ARGUMENTS_SCHEMA = "Tensor q, Tensor k, Tensor v, Tensor? document_ids"
_SCALAR_ARGUMENTS_SCHEMA = "int window, bool is_causal, int block"


@torch.library.custom_op(
    "phalanx::attend_by_blocks",
    mutates_args=(),
    schema=f"({_TENSOR_ARGUMENTS_SCHEMA}, {_SCALAR_ARGUMENTS_SCHEMA}) -> (Tensor, Tensor)",
)
def _attend_by_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    document_ids: torch.Tensor | None,
    window: int,
    is_causal: bool,
    block: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, laid out as `q` is, and its log-sum-exp [B, H, T]."""
    q, k, v = (
        _ensure_contiguous_last_dim(q),
        _ensure_contiguous_last_dim(k),
        _ensure_contiguous_last_dim(v),
    )
    out, lse = _make_empty_output_and_lse(q)
    with torch.autocast(q.device.type, enabled=False):
        kernel, k, v = _choose_kernel_and_repeat_keys(q, k, v)
        for part in _split_queries_into_blocks(
            q, VisibleKeys(document_ids, window, is_causal), block
        ):
            rows, columns = part.rows, part.columns
            outputs = kernel.forward(
                q[:, :, rows], k[:, :, columns], v[:, :, columns], part.mask, False
            )
            out[:, :, rows], lse[:, :, rows] = outputs
            del part  # its mask goes before the next is made
    return out, lse


@torch.library.custom_op(
    "phalanx::attend_by_blocks_backward",
    mutates_args=(),
    schema=(
        f"(Tensor grad, {_TENSOR_ARGUMENTS_SCHEMA}, Tensor out, Tensor lse,"
        f" {_SCALAR_ARGUMENTS_SCHEMA}) -> (Tensor, Tensor, Tensor)"
    ),
)
def _attend_by_blocks_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    document_ids: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    window: int,
    is_causal: bool,
    block: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v. Those of keys add up over blocks, in at least fp32."""
    grad, q, k, v = (
        grad.contiguous(),
        _ensure_contiguous_last_dim(q),
        _ensure_contiguous_last_dim(k),
        _ensure_contiguous_last_dim(v),
    )
    grad_q, (batch, heads, tokens, width) = torch.empty_like(q), k.shape
    sums = torch.zeros(2, batch, heads, tokens, width, dtype=lse.dtype, device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        kernel, all_k, all_v = _choose_kernel_and_repeat_keys(q, k, v)
        for part in _split_queries_into_blocks(
            q, VisibleKeys(document_ids, window, is_causal), block
        ):
            rows, columns = part.rows, part.columns
            block_grad_q, *block_grad_kv = kernel.backward(
                grad[:, :, rows],
                q[:, :, rows],
                all_k[:, :, columns],
                all_v[:, :, columns],
                out[:, :, rows],
                lse[:, :, rows],
                part.mask,
                False,
            )
            grad_q[:, :, rows] = block_grad_q
            for total, block_grad in zip(sums, block_grad_kv, strict=True):
                # Summed over the query heads of a group.
                by_head = block_grad.unflatten(1, (heads, -1))
                total[:, :, columns] += by_head.sum(2, dtype=lse.dtype)
            del part
    # A custom operator must not return views of one tensor, which `to` gives where no cast is
    # needed.
    grad_k, grad_v = (total.to(k.dtype, copy=True) for total in sums)
    return grad_q, grad_k, grad_v


@_attend_by_blocks.register_fake
def _fake_attend_by_blocks(q: torch.Tensor, *unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _make_empty_output_and_lse(_ensure_contiguous_last_dim(q))


@_attend_by_blocks_backward.register_fake
def _fake_attend_by_blocks_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *unused: Any
) -> tuple[torch.Tensor, ...]:
    return (
        torch.empty_like(_ensure_contiguous_last_dim(q)),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
    )


def _make_empty_output_and_lse(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty(
        q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32)
    )


def _save_attention_for_backward(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    q, k, v, document_ids, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, document_ids, *output)


def _compute_attention_gradients(
    ctx: Any, grad: torch.Tensor, _grad_of_lse: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    # `compute_attention_by_blocks` keeps the log-sum-exp to itself, so its gradient is always zero.
    return (
        *_attend_by_blocks_backward(grad, *ctx.saved_tensors, *ctx.numbers),
        None,
        None,
        None,
        None,
    )


_attend_by_blocks.register_autograd(
    _compute_attention_gradients, setup_context=_save_attention_for_backward
)
