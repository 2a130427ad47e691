"""Bytes that autograd keeps from the forward to the backward, tensor by tensor, for every shape of
model; and the masks of attention.

`c` is the size of the compute type: 4 in fp32, 2 in bf16. Tests compare this with what autograd
saves. Experts are counted at even load, and none dropped.
"""

from __future__ import annotations

from phalanx.job.shape import ModelShape
from phalanx.plan.workload import Workload


def block_activation_bytes(shape: ModelShape, c: int, *, experts: bool, parts: int = 1) -> int:
    """Bytes that autograd saves of one block for one token.

    `parts`: into how many the sequence is cut outside attention and feed-forward.
    """
    inputs = norm_input_bytes(shape, shape.dim, c) * (4 if shape.post_norms else 2) // parts
    norms = inputs + 2 * shape.dim * c  # what enters a matrix product is gathered before
    attention = _latent_attention_bytes(shape, c) if shape.kv_rank else _attention_bytes(shape, c)
    return (
        norms
        + attention
        + (_experts_bytes(shape, c) if experts else _ffn_bytes(shape, shape.ffn_dim, c))
    )


def product_bytes(shape: ModelShape, c: int, *, experts: bool) -> int:
    """Bytes that selective recompute saves of one block for one token: the results of its matrix
    products and of its attention."""
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    # both products of queries and of keys and values, and the output, which is as wide as queries
    if shape.kv_rank:
        num_features = _latent_products(shape) + heads * shape.head_dim
    else:
        num_features = 2 * (heads + kv_heads) * shape.head_dim  # q and the output, k and v
    attention = (num_features + shape.dim) * c + 4 * heads
    wide = (2 if shape.is_gated else 1) * c
    if not experts:
        return attention + wide * shape.ffn_dim + shape.dim * c
    # The router's product is in fp32; shared experts are one feed-forward.
    visited, outputs = (
        shape.experts_per_token + shape.num_shared_experts,
        shape.experts_per_token + _has_shared_experts(shape),
    )
    return (
        attention
        + 4 * shape.num_experts
        + visited * wide * shape.expert_ffn_dim
        + outputs * shape.dim * c
    )


def product_bytes_in_both(shape: ModelShape, c: int, *, experts: bool) -> int:
    """The part of `product_bytes` that autograd saves without recompute, too: the attention's
    results, the inputs of the activation and of the gate's product, and the outputs of experts,
    which are weighted.

    A selectively recomputed block makes the rest of `block_activation_bytes` again.
    """
    attention = shape.num_heads * (shape.head_dim * c + 4)
    if shape.kv_rank and c == 4:  # norms keep their inputs as they are
        attention += c * (shape.query_rank + shape.kv_rank + shape.rope_head_dim)
    wide = (2 if shape.is_gated else 1) * c
    if not experts:
        return attention + wide * shape.ffn_dim
    visited = shape.experts_per_token + shape.num_shared_experts
    return (
        attention + wide * visited * shape.expert_ffn_dim + shape.experts_per_token * shape.dim * c
    )


def weight_input_bytes(shape: ModelShape, c: int, *, experts: bool) -> int:
    """Bytes of one block for one token that its weight gradients are computed from, where these
    wait for the rest of the backward (zero-bubble schedules).

    Of each matrix what went in, once where several read it, and what came back.

    The router does not wait: its gradient is made with the rest.
    """
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.dim
    if shape.kv_rank:
        # What came back to all its matrices, the latents that went in, and what went into the
        # output.
        num_features = (
            _latent_products(shape)
            + shape.query_rank
            + shape.kv_rank
            + heads * shape.value_head_dim
        )
    else:
        num_features = (
            2 * heads + 2 * kv_heads
        ) * shape.head_dim  # what came back to q, k, v; what went into the output
    attention = 2 * dim + num_features
    wide = 3 if shape.is_gated else 2
    if not experts:
        return c * (attention + 2 * dim + wide * shape.ffn_dim)
    visited, inputs = (
        shape.experts_per_token + shape.num_shared_experts,
        shape.experts_per_token + _has_shared_experts(shape),
    )
    return c * (attention + 2 * dim * inputs + visited * wide * shape.expert_ffn_dim)


def norm_bytes(shape: ModelShape, width: int, c: int, parts: int = 1) -> int:
    """Bytes per token of a norm whose output enters a matrix product, which saves it."""
    return norm_input_bytes(shape, width, c) // parts + width * c


def norm_input_bytes(shape: ModelShape, width: int, c: int) -> int:
    """Bytes per token that a norm alone saves.

    LayerNorm: its input, mean and deviation. RMSNorm: input and normalised input, both fp32.
    """
    return width * c + 8 if shape.norm == "layernorm" else _rms_bytes(width)


def _rms_bytes(width: int) -> int:
    return 2 * 4 * width + 4


def _attention_bytes(shape: ModelShape, c: int) -> int:
    """Bytes per token of attention: q, k, v (keys and values with their own heads), the output, and
    one fp32 log-sum-exp per head.

    Rotated queries lie head by head, and so does the output, which is copied before it enters its
    matrix. Norms of queries and keys work on every head: one deviation each.
    """
    width, kv_width = (heads * shape.head_dim for heads in (shape.num_heads, shape.num_kv_heads))
    is_copied = shape.positions == "rope" and not shape.reads_images
    saved = ((3 if is_copied else 2) * width + 2 * kv_width) * c + 4 * shape.num_heads
    return saved + (
        (shape.num_heads + shape.num_kv_heads) * _rms_bytes(shape.head_dim) if shape.qk_norm else 0
    )


def _latent_attention_bytes(shape: ModelShape, c: int) -> int:
    """Bytes per token of latent attention: latents with their norms; q, k, v and the output, all of
    head_dim; and the part of the output that enters its matrix.

    Where nothing is cast, what the latent's norm keeps is a part of a product that has the rotated
    key, too.
    """
    heads, latents = shape.num_heads, [rank for rank in (shape.query_rank, shape.kv_rank) if rank]
    norms = sum(_rms_bytes(rank) + rank * c for rank in latents) + (
        c * shape.rope_head_dim if c == 4 else 0
    )
    return norms + heads * (4 * shape.head_dim + shape.value_head_dim) * c + 4 * heads


def _latent_products(shape: ModelShape) -> int:
    """The number of features that latent attention's matrices before the attention put out."""
    keys_and_values = shape.num_heads * (
        shape.head_dim - shape.rope_head_dim + shape.value_head_dim
    )
    down = shape.query_rank + shape.kv_rank + shape.rope_head_dim
    return down + shape.num_heads * shape.head_dim + keys_and_values


def _ffn_bytes(shape: ModelShape, width: int, c: int) -> int:
    """Bytes per token of a feed-forward of inner `width`. With a gate: gate, its activation, up,
    and their product. Without: up and its activation."""
    return (4 if shape.is_gated else 2) * width * c


def _experts_bytes(shape: ModelShape, c: int) -> int:
    """Bytes per token of the experts. Each visited expert saves its input, its inside, its output,
    and four numbers: its index (with its weight before normalisation), the place and the owner of
    its row, and its weight.

    The scores are in fp32.

    What the router reads is the norm's output, in fp32: beside shared experts or in place of what
    `block_activation_bytes` counts.
    """
    inside = _ffn_bytes(shape, shape.expert_ffn_dim, c)
    numbers = 3 * 8 + 4 + (4 if shape.router_normalize else 0)
    routed = shape.experts_per_token * (2 * shape.dim * c + inside + numbers)
    sums = 4 * (shape.router_normalize + (shape.router_scores == "sigmoid"))
    read = 0 if c == 4 else shape.dim * (4 if _has_shared_experts(shape) else 4 - c)
    return 4 * shape.num_experts + sums + read + routed + shape.num_shared_experts * inside


def _has_shared_experts(shape: ModelShape) -> bool:
    return shape.num_shared_experts > 0


def table_bytes(shape: ModelShape) -> int:
    """Bytes per token of the tables of cosines and sines, in fp32: one table for each kind of block
    that has its own."""
    if shape.reads_images or shape.positions != "rope":
        return 0
    return 4 * (shape.rope_head_dim or shape.head_dim) * num_block_kinds(shape)


def num_block_kinds(shape: ModelShape) -> int:
    """The number of kinds of blocks: 2 if some blocks have a window and others have not, else 1."""
    return 2 if 0 < shape.num_local_layers < shape.num_layers else 1


def image_bytes(shape: ModelShape, c: int) -> int:
    """Bytes of one image, which the patches' matrix saves."""
    return shape.num_channels * shape.image_size**2 * c


QUERY_BLOCK = (
    1024  # rows of one mask at most: the queries of longer sequences are taken in blocks of so many
)


def common_mask_bytes(shape: ModelShape, work: Workload) -> int:
    """Bytes of the masks of a microbatch that all blocks share, where one mask has all queries: one
    for each kind of block that needs one; of documents, one for every sequence.

    With cp a mask has a rank's own queries; ulysses has all of them.
    """
    if not _needs_masks(shape, work) or _num_queries(work) > QUERY_BLOCK:
        return 0
    pairs = _num_queries(work) * work.seq_len * work.compute_bytes
    return work.micro_batch_size * pairs * num_block_kinds(shape) if work.document_masks else pairs


def block_mask_bytes(shape: ModelShape, work: Workload) -> int:
    """Bytes, at the worst moment, of masks that are made for a block of queries at a time: the mask
    of one block, and the booleans that it is made of.

    Autograd keeps none of them.
    """
    if not _needs_masks(shape, work) or _num_queries(work) <= QUERY_BLOCK:
        return 0
    has_full = shape.num_local_layers < shape.num_layers or not _has_window(shape, work)
    num_keys = (
        work.seq_len
        if has_full and work.document_masks
        else min(work.seq_len, _window_reach(shape))
    )
    if work.cp_attention != "ulysses":
        num_keys = min(num_keys, work.seq_len // work.cp)  # those of one rank at a time
    return (
        (work.micro_batch_size if work.document_masks else 1)
        * QUERY_BLOCK
        * num_keys
        * (work.compute_bytes + 1)
    )


def _needs_masks(shape: ModelShape, work: Workload) -> bool:
    return not shape.reads_images and (work.document_masks or _has_window(shape, work))


def _has_window(shape: ModelShape, work: Workload) -> bool:
    return 0 < shape.sliding_window < work.seq_len and shape.num_local_layers > 0


def _window_reach(shape: ModelShape) -> int:
    """The number of keys that a block of queries sees through the window."""
    return QUERY_BLOCK + shape.sliding_window - 1


def _num_queries(work: Workload) -> int:
    """The number of queries in a mask: those of this rank; with ulysses, which has some heads of
    all tokens, those of the whole sequence."""
    return work.seq_len if work.cp_attention == "ulysses" else work.seq_len // work.cp
