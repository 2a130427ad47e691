"""Three ways to attend over sequences of which each rank has a part: ring, all-gather and Ulysses.

Ring (arXiv 2310.01889): keys and values travel from rank to rank; each block is computed while the
next is on its way. All-gather (Llama 3, arXiv 2407.21783): every rank gets all of them at once.
Ulysses (arXiv 2309.14509): an all-to-all makes of a part of the tokens with all heads all tokens
with a part of the heads, and another one back.

Shape suffixes: B batch, H query heads, K key/value heads, T this rank's tokens, E head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from phalanx.core.block_sizes import get_block_sizes
from phalanx.mesh.attend import compute_attention
from phalanx.mesh.attend_blocks import VisibleKeys, compute_attention_by_blocks
from phalanx.mesh.devices import is_on_cpu
from phalanx.parallel.context.block_attention import (
    BlockAttention,
    KeyValueBlock,
    OnlineSoftmaxOutput,
)
from phalanx.parallel.context.group import GRADIENTS, KEYS, ContextGroup

Attend = Callable[..., torch.Tensor]
MaskOrVisibleKeys: TypeAlias = torch.Tensor | VisibleKeys | None


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: MaskOrVisibleKeys,
    window: int,
    group: ContextGroup,
) -> torch.Tensor:
    """[B, H, T, E].

    `mask`: [B or 1, 1, T, all keys in rank order]; or VisibleKeys, from which each block of
    queries gets its mask; or None: causal alone.
    """
    out: torch.Tensor = _BlockwiseAttentionFunction.apply(
        q, k, v, mask, window, group, _RingExchange
    )
    return out


def all_gather_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: MaskOrVisibleKeys,
    window: int,
    group: ContextGroup,
) -> torch.Tensor:
    """Attend as `ring` does, to keys and values that are gathered first."""
    out: torch.Tensor = _BlockwiseAttentionFunction.apply(
        q, k, v, mask, window, group, _AllGatherExchange
    )
    return out


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: MaskOrVisibleKeys,
    window: int,
    group: ContextGroup,
) -> torch.Tensor:
    """[B, H, T, E].

    `mask`: [B or 1, 1, all tokens, all tokens] in the sequence's order; else as of `ring`.
    """
    q, k, v = (_TokensToHeads.apply(x, group) for x in (q, k, v))
    if isinstance(mask, VisibleKeys):
        out = compute_attention_by_blocks(
            q, k, v, mask.document_ids_BT, window=mask.window, is_causal=mask.is_causal
        )
    else:
        out = compute_attention(q, k, v, mask, is_causal=True)
    attended: torch.Tensor = _HeadsToTokens.apply(out, group)
    return attended


ATTENTION_FUNCTION_OF_CP_KIND: dict[str, Attend] = {
    "ring": ring_attention,
    "all-gather": all_gather_attention,
    "ulysses": ulysses_attention,
}


class _BlockwiseAttentionFunction(torch.autograd.Function):
    """Own queries against every rank's keys.

    The backward needs the output and log-sum-exp over all of them, with which each block's
    gradients are exact by themselves; the blocks come once more.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: MaskOrVisibleKeys,
        window: int,
        group: ContextGroup,
        carrier: type[_RingExchange] | type[_AllGatherExchange],
    ) -> torch.Tensor:
        # Keys and values travel as one message.
        q, kv = q.contiguous(), torch.stack((k, v))
        running, products = OnlineSoftmaxOutput.make_empty(q), BlockAttention(q)
        for owner, block_kv in carrier(group).iterate_key_value_blocks(kv):
            for block in _list_visible_blocks(group, owner, block_kv, mask, window):
                products.forward(running, block)
        out = running.out.to(q.dtype)
        # Autograd saves tensors alone: VisibleKeys is kept beside them.
        ctx.save_for_backward(
            q, kv, out, running.lse, *((mask,) if isinstance(mask, torch.Tensor) else ())
        )
        ctx.seen = mask if isinstance(mask, VisibleKeys) else None
        ctx.window, ctx.group, ctx.carrier = window, group, carrier
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        q, kv, out, lse, *masks = ctx.saved_tensors
        group, mask, grad = ctx.group, (masks[0] if masks else ctx.seen), grad.contiguous()
        grad_q, products = torch.zeros(q.shape, dtype=lse.dtype, device=q.device), BlockAttention(q)

        # Gradients add up over blocks in fp32 at least: in bf16 the sum over ranks would lose
        # digits.
        def compute_block_grad(owner: int, block_kv: torch.Tensor) -> torch.Tensor:
            grad_kv = torch.zeros(block_kv.shape, dtype=lse.dtype, device=q.device)
            for block in _list_visible_blocks(group, owner, block_kv, mask, ctx.window):
                products.backward(grad, out, lse, block, grad_q, grad_kv)
            return grad_kv

        grad_kv = (
            ctx.carrier(group).compute_own_key_value_gradients(kv, compute_block_grad).to(q.dtype)
        )
        return grad_q.to(q.dtype), grad_kv[0], grad_kv[1], None, None, None, None


def _list_visible_blocks(
    group: ContextGroup, owner: int, kv: torch.Tensor, mask: MaskOrVisibleKeys, window: int
) -> Iterator[KeyValueBlock]:
    """Blocks of `owner`'s keys that this rank's queries see: none, one product, or with
    VisibleKeys one for every block of queries and chunk of keys that meet."""
    chunks, num_tokens = group.chunks, kv.shape[3]
    part = chunks.find_visible_rectangle(group.rank, owner, num_tokens * group.size, window)
    if part is None:
        return
    length = num_tokens // chunks.chunks_per_rank
    rows, columns = part.query_token_slice(length), part.key_token_slice(length)
    if mask is None:
        yield KeyValueBlock(kv, rows, columns, None, part.is_causal)
    elif isinstance(mask, torch.Tensor):
        rank_mask = mask[:, :, rows, owner * num_tokens : (owner + 1) * num_tokens][..., columns]
        if not _hides_all_keys(rank_mask):
            yield KeyValueBlock(kv, rows, columns, rank_mask, is_causal=False)
    else:
        for at in range(part.first_query, part.last_query):
            for to in range(part.first_key, part.last_key):
                starts = (
                    chunks.list_chunks_of_rank(group.rank)[at] * length,
                    chunks.list_chunks_of_rank(owner)[to] * length,
                )
                yield from _list_visible_blocks_of_chunk_pair(
                    kv, (at * length, to * length), starts, length, mask
                )


def _list_visible_blocks_of_chunk_pair(
    kv: torch.Tensor,
    lies_at: tuple[int, int],
    starts: tuple[int, int],
    length: int,
    visible: VisibleKeys,
) -> Iterator[KeyValueBlock]:
    """The same of one chunk of queries and one of keys: where they lie among their ranks' tokens,
    and where they start in the sequence."""
    row, column = (lies - start for lies, start in zip(lies_at, starts, strict=True))
    block = get_block_sizes().query_block
    for first in range(starts[0], starts[0] + length, block):
        last = min(first + block, starts[0] + length)
        first_key, end = visible.visible_key_range(first, last)
        first_key, end = max(first_key, starts[1]), min(end, starts[1] + length)
        if first_key < end:
            mask = visible.build_additive_mask(first, last, first_key, end, kv.dtype, kv.device)
            if not _hides_all_keys(mask):
                rows, columns = (
                    slice(first + row, last + row),
                    slice(first_key + column, end + column),
                )
                yield KeyValueBlock(kv, rows, columns, mask, is_causal=False)


def _hides_all_keys(mask: torch.Tensor) -> bool:
    """True if a mask on a CPU hides every key. A mask on a GPU would have to be waited for."""
    return is_on_cpu(mask) and not bool((mask == 0).any())


class _RingExchange:
    """Step s is that of the block of the rank s before this one.

    What travels does so while a block is computed.
    """

    def __init__(self, group: ContextGroup) -> None:
        self._group = group

    def iterate_key_value_blocks(self, kv: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        group = self._group
        for step in range(group.size):
            arriving = group.start_ring_exchange(kv, KEYS) if step + 1 < group.size else None
            yield (group.rank - step) % group.size, kv
            if arriving is not None:
                kv = arriving()

    def compute_own_key_value_gradients(
        self, kv: torch.Tensor, of_block: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """A block's gradients travel after it, a step behind, until they are home; its own
        rank's stay there."""
        group = self._group
        own_grad: torch.Tensor | None = None
        arriving: Callable[[], torch.Tensor] | None = None
        for step, (owner, block) in enumerate(self.iterate_key_value_blocks(kv)):
            block_grad = of_block(owner, block)
            if step == 0:
                own_grad = block_grad
                continue
            if arriving is not None:
                block_grad += arriving()
            # Sent when the block's own part is in: each rank adds to what it passes on.
            arriving = group.start_ring_exchange(block_grad, GRADIENTS)
        assert own_grad is not None
        assert arriving is not None
        return own_grad.add_(arriving())


class _AllGatherExchange:
    """All blocks at once, in the backward once more: kept, they would take each rank as much as
    the whole sequence."""

    def __init__(self, group: ContextGroup) -> None:
        self._group = group

    def iterate_key_value_blocks(self, kv: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        yield from enumerate(self._group.all_gather(kv))

    def compute_own_key_value_gradients(
        self, kv: torch.Tensor, of_block: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        rows = torch.stack(
            [of_block(owner, block) for owner, block in self.iterate_key_value_blocks(kv)]
        )
        return self._group.reduce_scatter(rows)


class _TokensToHeads(torch.autograd.Function):
    """[B, H, T, E] of this rank's tokens -> [B, H / ranks, all tokens, E] in the sequence's
    order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ContextGroup) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        return _tokens_to_heads(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _heads_to_tokens(grad, ctx.group), None


class _HeadsToTokens(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ContextGroup) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        return _heads_to_tokens(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _tokens_to_heads(grad, ctx.group), None


def _tokens_to_heads(x_BHTE: torch.Tensor, group: ContextGroup) -> torch.Tensor:
    rows = x_BHTE.unflatten(1, (group.size, -1)).movedim(1, 0)  # [ranks, B, H / ranks, T, E]
    arrived = group.all_to_all(rows).movedim(0, 2).flatten(2, 3)
    if group.chunks.is_in_sequence_order:
        return arrived
    return arrived.index_select(
        2, group.chunks.indices_from_rank_order_to_sequence(arrived.shape[2], x_BHTE.device)
    )


def _heads_to_tokens(x_BHTE: torch.Tensor, group: ContextGroup) -> torch.Tensor:
    ordered = x_BHTE
    if not group.chunks.is_in_sequence_order:
        ordered = x_BHTE.index_select(
            2, group.chunks.positions_in_rank_order(x_BHTE.shape[2], x_BHTE.device)
        )
    rows = ordered.unflatten(2, (group.size, -1)).movedim(2, 0)  # [ranks, B, H / ranks, T, E]
    return group.all_to_all(rows).movedim(0, 1).flatten(1, 2)
