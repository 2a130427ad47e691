"""What a decoder keeps from the forward to the backward. Experts are counted at even load, and none
dropped."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from phalanx.job.costs import BlockBytes, FreedGradients, LossBytes, RankMicrobatch
from phalanx.job.shapes import masks
from phalanx.job.shapes.block_activations import (
    BlockPartBytes,
    TransformerActivations,
    count_attention_bytes,
    count_chunked_loss,
    count_feed_forward_bytes,
    count_inner_feed_forward_bytes,
    count_norm_saved_bytes,
    count_rms_norm_saved_bytes,
    scale_block_bytes,
    sum_block_bytes,
)

if TYPE_CHECKING:
    from phalanx.job.shapes.decoder import DecoderShape

# Of a token, where the embedding is cut: its row here, and whether that is elsewhere.
LOOKED_UP_BYTES = 9


@dataclass(frozen=True)
class DecoderActivations(TransformerActivations):
    """The activations of the decoder `shape`."""

    shape: DecoderShape
    _blocks: dict[tuple[bool, int, int, int], BlockBytes] = field(
        default_factory=dict, repr=False, compare=False
    )

    def block(self, layer: int, batch: RankMicrobatch) -> BlockBytes:
        # A plan asks for every block of many layouts, and there are two kinds of blocks at most.
        kind = (self._has_experts_by_layer[layer], batch.compute_bytes, batch.sequence_parts)
        key = (*kind, batch.tokens)
        if key not in self._blocks:
            self._blocks[key] = scale_block_bytes(self._count_block(*kind), batch.tokens)
        return self._blocks[key]

    def list_block_kinds(self, batch: RankMicrobatch) -> tuple[bool, ...]:
        return self._has_experts_by_layer

    @cached_property
    def _has_experts_by_layer(self) -> tuple[bool, ...]:
        return tuple(map(self.shape.has_experts, range(self.shape.num_layers)))

    def _count_block(self, has_experts: bool, c: int, sequence_parts: int) -> BlockBytes:
        """Bytes for one token."""
        shape = self.shape
        attention = count_attention_bytes(shape, c, is_rotated=shape.positions == "rope")
        if shape.has_latent_attention:
            attention = _latent_attention_bytes(shape, c)
        feed_forward = count_feed_forward_bytes(shape, c)
        if has_experts:
            feed_forward = _count_experts_bytes(shape, c)
        return sum_block_bytes(shape, c, sequence_parts, attention, feed_forward)

    def count_bytes_in_every_stage(self, batch: RankMicrobatch) -> int:
        """Bytes of the masks that all blocks share, and of the tables of cosines and sines in
        fp32, one for each kind of block that has its own."""
        tables = 0
        if self.shape.positions == "rope":
            # cos and sin of rotated_dim / 2 angles each, 4 bytes a number.
            tables = 4 * self.shape.rotated_dim * masks.count_block_kinds(self.shape)
        return masks.count_shared_mask_bytes(self.shape, batch) + batch.tokens * tables

    def count_embedding_bytes(self, batch: RankMicrobatch) -> int:
        if batch.tp > 1:
            return batch.tokens * LOOKED_UP_BYTES
        return 0

    def count_final_norm_bytes(self, batch: RankMicrobatch) -> int:
        shape = self.shape
        return batch.tokens * count_norm_saved_bytes(
            shape, shape.dim, batch.compute_bytes, batch.sequence_parts
        )

    def count_block_mask_bytes(self, batch: RankMicrobatch) -> int:
        return masks.count_query_block_mask_bytes(self.shape, batch)

    def count_loss_bytes(self, batch: RankMicrobatch) -> LossBytes:
        return count_chunked_loss(batch, self.shape.vocab_size, self.shape.dim)

    def fp8_params(self) -> int:
        """Parameters of the layers that multiply in fp8: those of blocks, without the experts that
        tokens are sent to."""
        experts = self.shape.experts
        return self.shape.blocks_params - (
            experts.count_chosen_params() if experts is not None else 0
        )

    def find_freed_gradients(self, ep: int) -> FreedGradients:
        shape = self.shape
        first = shape.ffn_dim * shape.dim
        if shape.num_expert_layers:
            first = shape.num_experts // ep * shape.expert_ffn_dim * shape.dim
        return FreedGradients(
            shape.vocab_size * shape.dim,
            shape.count_largest_block_params(ep),
            max(shape.dim, shape.ffn_dim) * shape.dim,
            first,
        )


def _latent_attention_bytes(shape: DecoderShape, c: int) -> BlockPartBytes:
    """Bytes per token of latent attention: latents with their norms; q, k, v and the output, all
    of head_dim; and the part of the output that enters its matrix.

    Where nothing is cast, what the latent's norm keeps is a part of a product that has the rotated
    key, too.
    """
    heads, products = shape.num_heads, _count_latent_products(shape)
    latents = shape.query_rank + shape.kv_rank
    # q, k, v and the output, the part of it that its matrix reads, and a log-sum-exp per head.
    saved = heads * (4 * shape.head_dim + shape.value_head_dim) * c + 4 * heads
    for rank in filter(None, (shape.query_rank, shape.kv_rank)):
        saved += count_rms_norm_saved_bytes(rank) + rank * c
    in_both = heads * (shape.head_dim * c + 4)
    if c == 4:  # norms keep their inputs as they are
        saved += c * shape.rope_head_dim
        in_both += c * (latents + shape.rope_head_dim)
    # What came back to all its matrices, the latents that went in, and what went into the output.
    waiting = products + latents + heads * shape.value_head_dim
    return BlockPartBytes(
        saved,
        (products + heads * shape.head_dim + shape.dim) * c + 4 * heads,
        in_both,
        c * (2 * shape.dim + waiting),
        keeps_input=True,
    )


def _count_latent_products(shape: DecoderShape) -> int:
    """The number of features that latent attention's matrices before the attention put out."""
    keys_and_values = shape.num_heads * (
        shape.head_dim - shape.rope_head_dim + shape.value_head_dim
    )
    down = shape.query_rank + shape.kv_rank + shape.rope_head_dim
    return down + shape.num_heads * shape.head_dim + keys_and_values


def _count_experts_bytes(shape: DecoderShape, c: int) -> BlockPartBytes:
    """Bytes per token of the experts. Each visited expert saves its input, its inside, its output,
    and four numbers: its index (with its weight before normalisation), the place and the owner of
    its row, and its weight.

    The scores are in fp32.

    What the router reads is the norm's output, in fp32: beside shared experts or in place of what
    the block's norms count.
    """
    has_shared = shape.num_shared_experts > 0
    inside = count_inner_feed_forward_bytes(shape, shape.expert_ffn_dim, c)
    # Index, place and owner as int64, and the weight in fp32, before normalisation once more.
    numbers = 3 * 8 + 4 + 4 * shape.router_normalize
    routed = shape.experts_per_token * (2 * shape.dim * c + inside + numbers)
    sums = 4 * (shape.router_normalize + (shape.router_scores == "sigmoid"))
    read = 0
    if c != 4:
        read = shape.dim * (4 if has_shared else 4 - c)
    scores = 4 * shape.num_experts
    # Shared experts are one feed-forward. The router's weight gradient does not wait: it is made
    # with the rest of the backward.
    visited = shape.experts_per_token + shape.num_shared_experts
    passes = shape.experts_per_token + has_shared
    wide = (shape.num_matrices - 1) * visited * shape.expert_ffn_dim
    waiting = shape.num_matrices * visited * shape.expert_ffn_dim
    return BlockPartBytes(
        scores + sums + read + routed + shape.num_shared_experts * inside,
        scores + wide * c + passes * shape.dim * c,
        wide * c + shape.experts_per_token * shape.dim * c,
        c * (2 * shape.dim * passes + waiting),
        _count_experts_passing(shape, c),
        keeps_input=True,
    )


def _count_experts_passing(shape: DecoderShape, c: int) -> int:
    """Bytes per token of gradients inside of the experts at the worst moment: of what enters and
    leaves the last matrix of chosen ones, or of the factors of what enters. Shared experts come
    first, and what they saved is gone then."""
    wide = (shape.num_matrices - 1) * shape.expert_ffn_dim
    chosen = shape.experts_per_token * max(wide, shape.dim + shape.expert_ffn_dim)
    shared = shape.num_shared_experts * wide
    return c * max(shared, chosen - 2 * shared)
