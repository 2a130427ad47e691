"""Parameters and FLOPs of a `ModelShape`, counted part by part.

FLOPs follow the usual model-FLOP convention: a multiply-add is two, the backward is twice the forward, recomputation
is not counted, nor are norms, activations and softmax. See Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models" (2022). Attention counts the pairs that the mask keeps, not what a kernel computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.job.shape import ModelShape


def norm_params(shape: ModelShape) -> int:
    """Of one norm of the residual stream."""
    return shape.dim * (2 if shape.norm == "layernorm" else 1)


def attention_params(shape: ModelShape) -> int:
    """Of one block: matrices, biases and the norms of queries and keys or of the latents."""
    return attention_weights(shape) + _attention_vectors(shape)


def attention_weights(shape: ModelShape) -> int:
    """Elements of one block's attention matrices."""
    if shape.kv_rank:
        return _latent_attention_weights(shape)
    return shape.dim * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)


def _latent_attention_weights(shape: ModelShape) -> int:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1)."""
    heads, rotated, values = shape.num_heads, shape.rope_head_dim, shape.value_head_dim
    queries = heads * shape.head_dim
    into = shape.dim * (shape.kv_rank + rotated)
    out_of = shape.kv_rank * heads * (shape.head_dim - rotated + values)
    query = shape.query_rank * (shape.dim + queries) if shape.query_rank else shape.dim * queries
    return query + into + out_of + heads * values * shape.dim


def _attention_vectors(shape: ModelShape) -> int:
    if shape.kv_rank:
        return shape.kv_rank + shape.query_rank  # an RMSNorm of each latent
    heads = shape.num_heads + 2 * shape.num_kv_heads
    biases = 0 if shape.bias == "none" else heads * shape.head_dim
    if shape.bias == "all":
        biases += shape.dim
    return biases + (2 * shape.head_dim if shape.qk_norm else 0)


def ffn_params(shape: ModelShape, width: int) -> int:
    """Of a feed-forward of inner `width`."""
    biases = (2 if shape.is_gated else 1) * width + shape.dim if shape.bias == "all" else 0
    return ffn_weights(shape, width) + biases


def ffn_weights(shape: ModelShape, width: int) -> int:
    return (3 if shape.is_gated else 2) * shape.dim * width


def experts_params(shape: ModelShape) -> int:
    """Of the experts of one block, without the router."""
    return (shape.num_experts + shape.num_shared_experts) * ffn_params(shape, shape.expert_ffn_dim)


def router_params(shape: ModelShape) -> int:
    return shape.dim * shape.num_experts


def _block_norms(shape: ModelShape) -> int:
    return (4 if shape.post_norms else 2) * norm_params(shape)


def block_params(shape: ModelShape) -> int:
    """Of the largest block."""
    dense, sparse = _feed_forward_of_blocks(shape)
    return attention_params(shape) + _block_norms(shape) + max(dense, sparse)


def _feed_forward_of_blocks(shape: ModelShape) -> tuple[int, int]:
    """Of a block with a dense feed-forward and of one with experts; 0 where there is none."""
    has_dense = shape.num_expert_layers < shape.num_layers
    sparse = experts_params(shape) + router_params(shape) if shape.num_expert_layers else 0
    return ffn_params(shape, shape.ffn_dim) if has_dense else 0, sparse


def blocks_params(shape: ModelShape) -> int:
    """Of all blocks together."""
    dense, sparse = _feed_forward_of_blocks(shape)
    same = shape.num_layers * (attention_params(shape) + _block_norms(shape))
    return same + (shape.num_layers - shape.num_expert_layers) * dense + shape.num_expert_layers * sparse


def params_by_group(shape: ModelShape) -> dict[str, int]:
    """Parameters of the whole model by what they do; groups for experts only where there are some."""
    sparse = shape.num_expert_layers
    groups = {
        "embedding": _embedding_params(shape),
        "attention": shape.num_layers * attention_params(shape),
        "ffn": (shape.num_layers - sparse) * ffn_params(shape, shape.ffn_dim),
    }
    if sparse:
        groups |= {"experts": sparse * experts_params(shape), "router": sparse * router_params(shape)}
    norms = shape.num_layers * _block_norms(shape) + norm_params(shape)
    return groups | {"norms": norms, "head": _head_params(shape)}


def _embedding_params(shape: ModelShape) -> int:
    if shape.reads_images:
        patch = shape.num_channels * shape.patch_size**2
        class_token = 1 if shape.pooling == "class_token" else 0
        return shape.dim * (patch + 1 + class_token + shape.tokens_of(0))
    return (shape.vocab_size + shape.max_positions) * shape.dim


def _head_params(shape: ModelShape) -> int:
    if shape.reads_images:
        return (shape.dim + 1) * shape.num_classes
    return 0 if shape.tie_embeddings else shape.vocab_size * shape.dim


def idle_params(shape: ModelShape) -> int:
    """Of the experts that one token does not visit."""
    idle = shape.num_experts - shape.experts_per_token
    return shape.num_expert_layers * idle * ffn_params(shape, shape.expert_ffn_dim)


def flops_per_sample(shape: ModelShape, seq_len: int) -> dict[str, int]:
    """FLOPs of a whole sample: forward `matmul` and `attention`; `training`: 3x both.

    `matmul` includes the head, tied or not, and leaves out the embedding, which is a lookup.
    """
    tokens = shape.tokens_of(seq_len)
    matmul = 2 * (tokens * _block_matmuls(shape) + _outer_matmuls(shape, tokens))
    pair = 2 * shape.num_heads * (shape.head_dim + (shape.value_head_dim or shape.head_dim))
    attention = pair * _attended_pairs(shape, tokens)
    return {"matmul": matmul, "attention": attention, "training": 3 * (matmul + attention)}


def _block_matmuls(shape: ModelShape) -> int:
    """Multiply-adds of one token in the matrices of all blocks."""
    sparse = shape.num_expert_layers
    visited = shape.experts_per_token + shape.num_shared_experts
    dense = (shape.num_layers - sparse) * ffn_weights(shape, shape.ffn_dim)
    experts = sparse * (visited * ffn_weights(shape, shape.expert_ffn_dim) + router_params(shape))
    return shape.num_layers * attention_weights(shape) + dense + experts


def _outer_matmuls(shape: ModelShape, tokens: int) -> int:
    """Multiply-adds of one sample outside the blocks: the head, and what makes tokens of patches."""
    if shape.reads_images:
        patch = shape.num_channels * shape.patch_size**2
        return shape.dim * (shape.num_patches * patch + shape.num_classes)
    return tokens * shape.vocab_size * shape.dim


def _attended_pairs(shape: ModelShape, tokens: int) -> int:
    """Pairs of tokens, in all blocks of one sample, of which one attends to the other."""
    if shape.reads_images:
        return shape.num_layers * tokens**2
    window = min(shape.sliding_window or tokens, tokens)
    whole = tokens * (tokens + 1) // 2
    local = window * (window + 1) // 2 + (tokens - window) * window
    return shape.num_local_layers * local + (shape.num_layers - shape.num_local_layers) * whole
