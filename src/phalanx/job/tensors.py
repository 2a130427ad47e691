"""Names and shapes of a built-in model's parameters, without building it: what a checkpoint of
it must hold."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from phalanx.job.shape import ModelShape, ParamHolder

Shape = tuple[int, ...]


def tensor_shapes(shape: ModelShape) -> dict[str, Shape]:
    """Each parameter's name and shape, tied ones once.

    Experts are stacked (`blocks.3.moe.experts.up.weight`).
    """
    assert shape.is_known, "of a user's own module only counts are known"
    shapes = dict(_outside(shape))
    for layer in range(shape.num_layers):
        shapes.update((f"blocks.{layer}.{name}", size) for name, size in _block(shape, layer))
    return shapes


def stored_shapes(shape: ModelShape) -> dict[str, Shape]:
    """Names and shapes of the tensors that a checkpoint holds: `tensor_shapes`, and the biases
    by which experts are chosen, which are buffers."""
    routers = (
        range(shape.num_dense_layers, shape.num_layers)
        if shape.num_experts and shape.balance_bias
        else ()
    )
    return tensor_shapes(shape) | {
        f"blocks.{layer}.moe.router.bias": (shape.num_experts,) for layer in routers
    }


def module_names(shape: ModelShape) -> list[str]:
    """The names of all modules of the model, itself ("") first."""
    names = {"": None}
    for tensor in tensor_shapes(shape):
        parts = tensor.split(".")[:-1]
        names |= dict.fromkeys(".".join(parts[:count]) for count in range(1, len(parts) + 1))
    names |= dict.fromkeys(f"blocks.{layer}.attention.core" for layer in range(shape.num_layers))
    return list(names)


def list_holders(shape: ModelShape) -> dict[str, ParamHolder]:
    """The modules that hold parameters themselves, by name."""
    tensors: dict[str, dict[str, Shape]] = defaultdict(dict)
    for tensor, size in tensor_shapes(shape).items():
        owner, _, key = tensor.rpartition(".")
        tensors[owner][key] = size
    return {
        name: _holder(name, tensors_of_module, shape) for name, tensors_of_module in tensors.items()
    }


def _holder(name: str, tensors: dict[str, Shape], shape: ModelShape) -> ParamHolder:
    weight, num_params = tensors.get("weight", ()), sum(map(math.prod, tensors.values()))
    if len(weight) == 3:
        return ParamHolder(name, "grouped", num_params, *weight[1:])
    if name.endswith(".router"):
        return ParamHolder(name, "Router", num_params)
    if len(weight) == 2:
        kind = "embedding" if name in ("embed", "embed_positions") else "linear"
        return ParamHolder(name, kind, num_params, *weight)
    if len(weight) == 4:
        return ParamHolder(name, "Conv2d", num_params)
    if not name:
        return ParamHolder(name, "model", num_params)
    return ParamHolder(name, "LayerNorm" if shape.norm == "layernorm" else "RMSNorm", num_params)


def _outside(shape: ModelShape) -> Iterator[tuple[str, Shape]]:
    if shape.reads_images:
        yield "patch.weight", (shape.dim, shape.num_channels, shape.patch_size, shape.patch_size)
        yield "patch.bias", (shape.dim,)
        if shape.pooling == "class_token":
            yield "embed_class", (shape.dim,)
        yield "embed_positions", (shape.tokens_of(0), shape.dim)
        yield from _linear("head", shape.num_classes, shape.dim, True)
    else:
        yield "embed.weight", (shape.vocab_size, shape.dim)
        if shape.positions == "learned":
            yield "embed_positions.weight", (shape.max_positions, shape.dim)
        if not shape.tie_embeddings:
            yield "head.weight", (shape.vocab_size, shape.dim)
    yield from _norm("norm", shape)


def _block(shape: ModelShape, layer: int) -> Iterator[tuple[str, Shape]]:
    for name in (
        "attention_norm",
        "ffn_norm",
        *(("attention_post_norm", "ffn_post_norm") if shape.post_norms else ()),
    ):
        yield from _norm(name, shape)
    yield from (_latent_attention if shape.kv_rank else _attention)(shape)
    if not shape.has_experts(layer):
        yield from _feed_forward("ffn", shape, shape.ffn_dim)
        return
    yield "moe.router.weight", (shape.num_experts, shape.dim)
    for name, size in _feed_forward("moe.experts", shape, shape.expert_ffn_dim):
        yield name, (shape.num_experts, *size)
    if shape.num_shared_experts:
        yield from _feed_forward(
            "moe.shared", shape, shape.num_shared_experts * shape.expert_ffn_dim
        )


def _attention(shape: ModelShape) -> Iterator[tuple[str, Shape]]:
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    into, out_of = shape.bias != "none", shape.bias == "all"
    for name, width in (("q", queries), ("k", keys), ("v", keys)):
        yield from _linear(f"attention.{name}", width, shape.dim, into)
    yield from _linear("attention.o", shape.dim, queries, out_of)
    if shape.qk_norm:
        yield from (
            (f"attention.{name}.weight", (shape.head_dim,)) for name in ("q_norm", "k_norm")
        )


def _latent_attention(shape: ModelShape) -> Iterator[tuple[str, Shape]]:
    heads, dim, plain = shape.num_heads, shape.dim, shape.head_dim - shape.rope_head_dim
    if shape.query_rank:
        yield "attention.q_down.weight", (shape.query_rank, dim)
        yield "attention.q_norm.weight", (shape.query_rank,)
        yield "attention.q_up.weight", (heads * shape.head_dim, shape.query_rank)
    else:
        yield "attention.q.weight", (heads * shape.head_dim, dim)
    yield "attention.kv_down.weight", (shape.kv_rank + shape.rope_head_dim, dim)
    yield "attention.kv_norm.weight", (shape.kv_rank,)
    yield "attention.kv_up.weight", (heads * (plain + shape.value_head_dim), shape.kv_rank)
    yield "attention.o.weight", (dim, heads * shape.value_head_dim)


def _feed_forward(name: str, shape: ModelShape, width: int) -> Iterator[tuple[str, Shape]]:
    bias = shape.bias == "all"
    if shape.is_gated:
        yield from _linear(f"{name}.gate", width, shape.dim, bias)
    yield from _linear(f"{name}.up", width, shape.dim, bias)
    yield from _linear(f"{name}.down", shape.dim, width, bias)


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _norm(name: str, shape: ModelShape) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (shape.dim,)
    if shape.norm == "layernorm":
        yield f"{name}.bias", (shape.dim,)
