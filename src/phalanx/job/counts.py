"""Parameters and FLOPs of a `ModelShape`, counted part by part.

FLOPs follow the usual model-FLOP convention: a multiply-add is two, the backward is twice the
forward, recomputation is not counted, nor are norms, activations and softmax. See Korthikanti et
al., "Reducing Activation Recomputation in Large Transformer Models" (2022). Attention counts the
pairs that the mask keeps, not what a kernel computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.job.shape import ModelShape


def norm_params(shape: ModelShape) -> int:
    """Parameters of one norm of the residual stream."""
    return shape.dim * (2 if shape.norm == "layernorm" else 1)


def attention_params(shape: ModelShape) -> int:
    """Parameters of one block's attention: matrices, biases and the norms of queries and keys or
    of the latents."""
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
    """Parameters of a feed-forward of inner `width`."""
    biases = (2 if shape.is_gated else 1) * width + shape.dim if shape.bias == "all" else 0
    return ffn_weights(shape, width) + biases


def ffn_weights(shape: ModelShape, width: int) -> int:
    return (3 if shape.is_gated else 2) * shape.dim * width


def experts_params(shape: ModelShape, ep: int = 1) -> int:
    """Parameters of the experts of one block, without the router; if `ep` ranks spread them, of
    those that one rank has."""
    return (shape.num_experts // ep + shape.num_shared_experts) * ffn_params(
        shape, shape.expert_ffn_dim
    )


def spread_params(shape: ModelShape, first_block: int = 0, end: int | None = None) -> int:
    """Parameters of the experts that tokens choose, in the blocks from `first_block` to before
    `end`."""
    first = shape.num_layers - shape.num_expert_layers
    blocks = max(0, (shape.num_layers if end is None else end) - max(first_block, first))
    return blocks * shape.num_experts * ffn_params(shape, shape.expert_ffn_dim)


def router_params(shape: ModelShape) -> int:
    return shape.dim * shape.num_experts


def _block_norms(shape: ModelShape) -> int:
    return (4 if shape.post_norms else 2) * norm_params(shape)


def block_params(shape: ModelShape, ep: int = 1) -> int:
    """Parameters of the largest block."""
    dense, sparse = _feed_forward_of_blocks(shape, ep)
    return attention_params(shape) + _block_norms(shape) + max(dense, sparse)


def _feed_forward_of_blocks(shape: ModelShape, ep: int) -> tuple[int, int]:
    """Parameters of a block's dense feed-forward and of a block's experts with their router; 0
    if no block has it."""
    has_dense = shape.num_expert_layers < shape.num_layers
    sparse = experts_params(shape, ep) + router_params(shape) if shape.num_expert_layers else 0
    return ffn_params(shape, shape.ffn_dim) if has_dense else 0, sparse


def blocks_params(shape: ModelShape, ep: int = 1) -> int:
    """Parameters of all blocks together."""
    dense, sparse = _feed_forward_of_blocks(shape, ep)
    same = shape.num_layers * (attention_params(shape) + _block_norms(shape))
    return (
        same
        + (shape.num_layers - shape.num_expert_layers) * dense
        + shape.num_expert_layers * sparse
    )


def params_of_block(shape: ModelShape, layer: int, ep: int = 1) -> int:
    """Parameters of the block `layer`, counted from 0."""
    dense, sparse = _feed_forward_of_blocks(shape, ep)
    has_experts = layer >= shape.num_layers - shape.num_expert_layers
    return attention_params(shape) + _block_norms(shape) + (sparse if has_experts else dense)


def params_by_group(shape: ModelShape) -> dict[str, int]:
    """Parameters of the whole model by what they do; groups for experts only where there are
    some."""
    sparse = shape.num_expert_layers
    groups = {
        "embedding": embedding_params(shape),
        "attention": shape.num_layers * attention_params(shape),
        "ffn": (shape.num_layers - sparse) * ffn_params(shape, shape.ffn_dim),
    }
    if sparse:
        groups |= {
            "experts": sparse * experts_params(shape),
            "router": sparse * router_params(shape),
        }
    norms = shape.num_layers * _block_norms(shape) + norm_params(shape)
    return groups | {"norms": norms, "head": head_params(shape)}


def embedding_params(shape: ModelShape) -> int:
    """Parameters before the blocks: tables of tokens and positions, or what makes tokens of
    patches."""
    if shape.reads_images:
        patch = shape.num_channels * shape.patch_size**2
        class_token = 1 if shape.pooling == "class_token" else 0
        return shape.dim * (patch + 1 + class_token + shape.tokens_of(0))
    return (shape.vocab_size + shape.max_positions) * shape.dim


def head_params(shape: ModelShape) -> int:
    """Parameters of the head; 0 if it is the embedding's weight."""
    if shape.reads_images:
        return (shape.dim + 1) * shape.num_classes
    return 0 if shape.tie_embeddings else shape.vocab_size * shape.dim


def idle_params(shape: ModelShape) -> int:
    """Parameters of the experts that one token does not visit."""
    idle = shape.num_experts - shape.experts_per_token
    return shape.num_expert_layers * idle * ffn_params(shape, shape.expert_ffn_dim)


@dataclass(frozen=True)
class Flops:
    """FLOPs of one forward: products with weights, and attention between tokens."""

    matmul: int
    attention: int = 0

    @property
    def forward(self) -> int:
        return self.matmul + self.attention


def flops_per_sample(shape: ModelShape, seq_len: int) -> dict[str, int]:
    """FLOPs of a whole sample: forward `matmul` and `attention`; `training`: 3x both.

    `matmul` includes the head, tied or not, and leaves out the embedding of tokens, which is a
    lookup.
    """
    parts = [block_flops(shape, seq_len, layer) for layer in range(shape.num_layers)]
    parts += [embedding_flops(shape), head_flops(shape, seq_len)]
    matmul, attention = sum(part.matmul for part in parts), sum(part.attention for part in parts)
    return {"matmul": matmul, "attention": attention, "training": 3 * (matmul + attention)}


def block_flops(shape: ModelShape, seq_len: int, layer: int) -> Flops:
    """FLOPs of one sample in the block `layer`, counted from 0."""
    tokens = shape.tokens_of(seq_len)
    if shape.num_experts and layer >= shape.num_dense_layers:
        visited = shape.experts_per_token + shape.num_shared_experts
        feed_forward = visited * ffn_weights(shape, shape.expert_ffn_dim) + router_params(shape)
    else:
        feed_forward = ffn_weights(shape, shape.ffn_dim)
    pair = 2 * shape.num_heads * (shape.head_dim + (shape.value_head_dim or shape.head_dim))
    return Flops(
        2 * tokens * (attention_weights(shape) + feed_forward),
        pair * _attended_pairs(shape, tokens, layer),
    )


def embedding_flops(shape: ModelShape) -> Flops:
    """FLOPs of one sample before the blocks: looking a token up costs nothing, making tokens of
    patches does."""
    return Flops(2 * shape.dim * shape.num_patches * shape.num_channels * shape.patch_size**2)


def head_flops(shape: ModelShape, seq_len: int) -> Flops:
    """FLOPs of one sample after the blocks, whether the head is tied or not."""
    if shape.reads_images:
        return Flops(2 * shape.dim * shape.num_classes)
    return Flops(2 * shape.tokens_of(seq_len) * shape.vocab_size * shape.dim)


def _attended_pairs(shape: ModelShape, tokens: int, layer: int) -> int:
    """Pairs of tokens of one sample, in one block, of which one attends to the other."""
    if shape.reads_images:
        return tokens**2
    window = min(shape.sliding_window, tokens) if shape.is_local(layer) else tokens
    return window * (window + 1) // 2 + (tokens - window) * window
