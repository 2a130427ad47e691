"""The work of the built-in models' blocks: matrix products, attention and elementwise parts, from
the numbers of a shape.

Products that read the same input and stand beside each other (query, key and value; gate and up)
count as one, as fused layers do them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.job.work import AttentionWork, BlockWork, Matmul

if TYPE_CHECKING:
    from phalanx.job.shapes.decoder import DecoderShape
    from phalanx.job.shapes.transformer import TransformerShape


def build_work_of_blocks(shape: TransformerShape, num_tokens: int) -> tuple[BlockWork, ...]:
    """The work of each block for one sample of `num_tokens` tokens."""
    by_kind: dict[tuple[bool, int], BlockWork] = {}
    blocks = []
    for layer in range(shape.num_layers):
        # Blocks differ in these two alone.
        kind = (shape.has_experts(layer), shape.window_of_layer(layer))
        if kind not in by_kind:
            by_kind[kind] = _build_block_work(shape, num_tokens, layer)
        blocks.append(by_kind[kind])
    return tuple(blocks)


def _build_block_work(shape: TransformerShape, num_tokens: int, layer: int) -> BlockWork:
    has_experts = shape.has_experts(layer)
    experts = shape.experts if has_experts else None
    matmuls = [*shape.list_attention_matmuls(), *shape.list_feed_forward_matmuls(layer)]
    width, norms = shape.ffn_dim, 4 if shape.post_norms else 2
    uncut = norms * shape.norm_params
    routed_params = 0
    if experts is not None:
        shared = experts.params_of_block // experts.params - experts.count
        width = (experts.per_token + shared) * experts.width
        routed_params = experts.count * experts.params
        uncut += shape.dim * experts.count
    if shape.bias == "all":
        uncut += 2 * shape.dim
    head_features = shape.num_rotated_features
    if shape.qk_norm:
        head_features += (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return BlockWork(
        matmuls=tuple(matmuls),
        attention=AttentionWork(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            num_tokens=num_tokens,
            num_pairs=shape.count_attended_pairs(num_tokens, layer),
            is_causal=shape.is_causal,
        ),
        norm_features=norms * shape.dim,
        residual_features=2 * shape.dim,
        head_features=head_features,
        activation_features=width,
        is_gated=shape.is_gated,
        num_params=shape.count_block(layer),
        num_routed_params=routed_params,
        num_uncut_params=uncut,
        routed_dim=shape.dim if has_experts else 0,
        num_experts=experts.count if experts is not None else 0,
        experts_per_token=experts.per_token if experts is not None else 0,
    )


def list_attention_matmuls(shape: TransformerShape) -> list[Matmul]:
    """Query, key and value as one product, and the output."""
    queries = shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    return [
        Matmul("qkv", shape.dim, queries + 2 * keys, "column"),
        Matmul("attention_out", queries, shape.dim, "row"),
    ]


def list_latent_attention_matmuls(shape: DecoderShape) -> list[Matmul]:
    """The products of latent attention (arXiv 2405.04434, section 2.1): down to the latents, which
    every rank of tp does, and up to the heads."""
    heads, queries = shape.num_heads, shape.num_heads * shape.head_dim
    plain = shape.head_dim - shape.rope_head_dim
    if shape.query_rank:
        query = [
            Matmul("query_down", shape.dim, shape.query_rank),
            Matmul("query_up", shape.query_rank, queries, "column"),
        ]
    else:
        query = [Matmul("query", shape.dim, queries, "column")]
    return [
        *query,
        Matmul("kv_down", shape.dim, shape.kv_rank + shape.rope_head_dim),
        Matmul("kv_up", shape.kv_rank, heads * (plain + shape.value_dim), "column"),
        Matmul("attention_out", heads * shape.value_dim, shape.dim, "row"),
    ]


def list_dense_matmuls(
    shape: TransformerShape, width: int, prefix: str = "ffn", num_experts: int = 1, visited: int = 1
) -> list[Matmul]:
    """A feed-forward of inner `width`: up, with the gate in it, and down."""
    outputs = (shape.num_matrices - 1) * width
    return [
        Matmul(f"{prefix}_up", shape.dim, outputs, "column", num_experts, visited),
        Matmul(f"{prefix}_down", width, shape.dim, "row", num_experts, visited),
    ]


def list_expert_matmuls(shape: DecoderShape) -> list[Matmul]:
    """The router, the experts that a token chooses, and the shared ones as one of their joint
    width."""
    width = shape.expert_ffn_dim
    matmuls = [
        Matmul("router", shape.dim, shape.num_experts),
        *list_dense_matmuls(shape, width, "expert", shape.num_experts, shape.experts_per_token),
    ]
    if shape.num_shared_experts:
        matmuls += list_dense_matmuls(shape, shape.num_shared_experts * width, "shared")
    return matmuls
