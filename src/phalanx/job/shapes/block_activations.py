"""Bytes that autograd keeps of one block for one token, tensor by tensor.

`c` is the size of the compute type: 4 in fp32, 2 in bf16. Tests compare this with what autograd
saves.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.job.costs import BlockBytes, LossBytes, RankMicrobatch
from phalanx.job.shapes.transformer import TransformerShape


@dataclass(frozen=True)
class TransformerActivations:
    """The part that the activations of decoders and vision transformers have in common."""

    shape: TransformerShape

    def count_message_bytes(self, batch: RankMicrobatch) -> int:
        return batch.tokens * self.shape.dim * batch.compute_bytes // batch.sequence_parts

    def count_final_norm_passing_bytes(self, batch: RankMicrobatch) -> int:
        """Bytes in the backward of the last norm; of a LayerNorm 0: it has less than the loss."""
        if self.shape.norm == "layernorm":
            return 0
        # Of an RMSNorm the input, and five tensors of the backward, all of them in fp32.
        return batch.tokens * self.shape.dim * 6 * 4 // batch.sequence_parts

    def count_fp8_cast_bytes(self, tokens: int) -> int:
        shape = self.shape
        widest = max(shape.ffn_dim, shape.num_heads * shape.head_dim, shape.dim)
        return widest * (tokens + shape.dim)


@dataclass(frozen=True)
class BlockPartBytes:
    """`BlockBytes` of a block's attention, or of its feed-forward."""

    saved: int
    products: int
    products_in_both: int
    weight_inputs: int
    passing: int = 0
    keeps_input: bool = False
    """With sequence parallelism the forward keeps all of the input, and not a rank's part: not all
    that reads it is column-parallel."""


def sum_block_bytes(
    shape: TransformerShape, c: int, sequence_parts: int, *parts: BlockPartBytes
) -> BlockBytes:
    """The bytes of a block for one token: of its norms, its attention and its feed-forward."""
    num_norms = 2
    if shape.post_norms:
        num_norms = 4
    # What enters a matrix product is gathered before, and again in the backward.
    stream = shape.dim * c // sequence_parts
    kept_whole = sum(part.keeps_input for part in parts) * (shape.dim * c - stream)
    norms = (
        count_norm_own_saved_bytes(shape, shape.dim, c) * num_norms // sequence_parts
        + 2 * stream
        + kept_whole
    )
    return BlockBytes(
        norms + sum(part.saved for part in parts),
        stream,
        sum(part.products for part in parts),
        sum(part.products_in_both for part in parts),
        sum(part.weight_inputs for part in parts),
        _count_passing(shape, c, sequence_parts, parts[-1]),
        parts[-1].saved,
        2 * (shape.dim * c - stream) - kept_whole,
    )


def _count_passing(
    shape: TransformerShape, c: int, sequence_parts: int, feed_forward: BlockPartBytes
) -> int:
    """Bytes for one token at the worst moment of a block's backward beside what it saves. Held to
    dry runs by tests/unit/test_memory_phases.py."""
    dim = shape.dim
    # The residual stream's gradient passes by all of a block, and where the sequence is cut the
    # gradient of the feed-forward's output is gathered.
    stream = dim * c // sequence_parts
    gathered = dim * c if sequence_parts > 1 else 0
    moments = [stream + gathered + feed_forward.passing]
    # Where it enters the feed-forward: what gate and up gave, and one of their own gradients; all
    # that the feed-forward has saved is gone.
    gone = feed_forward.saved
    entering = dim * c * (shape.num_matrices - 1) + shape.ffn_dim * c
    moments.append(stream + gathered + entering - gone)
    # An RMSNorm's backward works in fp32 on five tensors; two of its own are gone, and its output.
    if shape.norm != "layernorm":
        freed = 2 * 4 * dim // sequence_parts
        norm = (5 * 4 * dim) // sequence_parts
        # A norm behind the feed-forward comes before anything of that is gone.
        if shape.post_norms:
            moments.append(stream + norm - freed // 2)
        moments.append(stream + norm - freed // (2 if c == 2 else 1) - dim * c - gone)
    return max(moments)


def scale_block_bytes(block: BlockBytes, tokens: int) -> BlockBytes:
    """The bytes of a block for `tokens` tokens, from those for one."""
    return BlockBytes(
        block.saved * tokens,
        block.entering * tokens,
        block.products * tokens,
        block.products_in_both * tokens,
        block.weight_inputs * tokens,
        block.passing * tokens,
        block.feed_forward * tokens,
        block.gathered * tokens,
    )


def count_chunked_loss(batch: RankMicrobatch, vocab_size: int, dim: int) -> LossBytes:
    """Bytes of the chunked cross-entropy: fp32 logits of one chunk, gradients of hidden states and
    head.

    In bf16 a chunk also exists in the compute type: as it leaves the matmul, and again as it enters
    the next. All of them have the same room, and the head's gradient adds up in place.
    """
    # Chunks share one piece of memory, so the largest counts, once.
    chunk = min(batch.loss_chunk_tokens, batch.tokens)
    logits = chunk * vocab_size * (4 + batch.cast_bytes)
    # Of hidden states in the compute type, of the head in fp32: it adds up over chunks.
    gradients = batch.tokens * dim * batch.compute_bytes + vocab_size * dim * 4
    return LossBytes(logits + gradients, gradients, logits, vocab_size * dim * 4)


def count_norm_saved_bytes(shape: TransformerShape, width: int, c: int, parts: int = 1) -> int:
    """Bytes per token of a norm whose output enters a matrix product, which saves it."""
    return count_norm_own_saved_bytes(shape, width, c) // parts + width * c


def count_norm_own_saved_bytes(shape: TransformerShape, width: int, c: int) -> int:
    """Bytes per token that a norm alone saves.

    LayerNorm: its input, mean and deviation. RMSNorm: input and normalised input, both fp32.
    """
    if shape.norm == "layernorm":
        return width * c + 8
    return count_rms_norm_saved_bytes(width)


def count_rms_norm_saved_bytes(width: int) -> int:
    """Bytes per token that an RMSNorm saves."""
    # Input and normalised input in fp32, and one reciprocal deviation.
    return 2 * 4 * width + 4


def count_attention_bytes(shape: TransformerShape, c: int, *, is_rotated: bool) -> BlockPartBytes:
    """Bytes per token of attention: q, k, v (keys and values with their own heads), the output,
    and one fp32 log-sum-exp per head.

    """
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    width, kv_width = heads * shape.head_dim, kv_heads * shape.head_dim
    # Rotated queries lie head by head, and so does the output, which is copied before it enters its
    # matrix.
    saved = ((3 if is_rotated else 2) * width + 2 * kv_width) * c + 4 * heads
    if shape.qk_norm:
        # Norms of queries and keys work on every head: one deviation each.
        saved += (heads + kv_heads) * count_rms_norm_saved_bytes(shape.head_dim)
    both_ways = 2 * width + 2 * kv_width  # q and the output, k and v
    return BlockPartBytes(
        saved,
        (both_ways + shape.dim) * c + 4 * heads,
        heads * (shape.head_dim * c + 4),
        # What came back to q, k, v; what went into the output; the norm's output, and what came
        # back to the output's matrix.
        c * (2 * shape.dim + both_ways),
    )


def count_feed_forward_bytes(shape: TransformerShape, c: int) -> BlockPartBytes:
    """Bytes per token of a dense feed-forward."""
    wide = (shape.num_matrices - 1) * shape.ffn_dim  # what gate and up put out
    return BlockPartBytes(
        count_inner_feed_forward_bytes(shape, shape.ffn_dim, c),
        wide * c + shape.dim * c,
        wide * c,
        c * (2 * shape.dim + shape.num_matrices * shape.ffn_dim),
        # The gradient of what enters the last matrix, and of the activation function's factors.
        wide * c,
    )


def count_inner_feed_forward_bytes(shape: TransformerShape, width: int, c: int) -> int:
    """Bytes per token inside of a feed-forward of inner `width`. With a gate: gate, its
    activation, up, and their product. Without: up and its activation."""
    return 2 * (shape.num_matrices - 1) * width * c
