"""Names and sizes of a built-in model's parameters, without building it: what a checkpoint of it
must hold, and which modules there are."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING

from phalanx.job.param_holder import ParamHolder

if TYPE_CHECKING:
    from phalanx.job.shapes.transformer import TransformerShape

Size = tuple[int, ...]


def list_all_tensors(shape: TransformerShape) -> dict[str, Size]:
    """Each parameter's name and size, tied ones once.

    Experts are stacked (`blocks.3.moe.experts.up.weight`).
    """
    sizes = shape.list_outer_tensors()
    for layer in range(shape.num_layers):
        of_block = list_block_tensors(shape, layer)
        sizes |= {f"blocks.{layer}.{name}": size for name, size in of_block.items()}
    return sizes


def list_block_tensors(shape: TransformerShape, layer: int) -> dict[str, Size]:
    """Names within the block `layer`, and sizes, of its parameters."""
    norms = ["attention_norm", "ffn_norm"]
    if shape.post_norms:
        norms += ["attention_post_norm", "ffn_post_norm"]
    sizes: dict[str, Size] = {}
    for name in norms:
        sizes |= list_norm_tensors(name, shape)
    return sizes | shape.list_attention_tensors() | shape.list_feed_forward_tensors(layer)


def list_feed_forward_params(name: str, shape: TransformerShape, width: int) -> dict[str, Size]:
    """Parameters of the feed-forward `name` of inner `width`."""
    has_bias = shape.bias == "all"
    sizes: dict[str, Size] = {}
    if shape.is_gated:
        sizes |= list_linear_tensors(f"{name}.gate", width, shape.dim, has_bias)
    sizes |= list_linear_tensors(f"{name}.up", width, shape.dim, has_bias)
    return sizes | list_linear_tensors(f"{name}.down", shape.dim, width, has_bias)


def list_linear_tensors(
    name: str, num_outputs: int, num_inputs: int, has_bias: bool
) -> dict[str, Size]:
    """Parameters of the linear layer `name`."""
    sizes: dict[str, Size] = {f"{name}.weight": (num_outputs, num_inputs)}
    if has_bias:
        sizes[f"{name}.bias"] = (num_outputs,)
    return sizes


def list_norm_tensors(name: str, shape: TransformerShape) -> dict[str, Size]:
    """Parameters of the norm `name` of the residual stream."""
    sizes: dict[str, Size] = {f"{name}.weight": (shape.dim,)}
    if shape.norm == "layernorm":
        sizes[f"{name}.bias"] = (shape.dim,)
    return sizes


def list_module_patterns(shape: TransformerShape) -> set[str]:
    """The names of modules with parameters, and of those around them, with `*` for the number of a
    block."""
    tensors = list(shape.list_outer_tensors())
    # Blocks differ in having experts or not, which the first ones have not: two are all kinds.
    for layer in (0, shape.num_layers - 1):
        tensors += [f"blocks.*.{name}" for name in list_block_tensors(shape, layer)]
    patterns: set[str] = set()
    for tensor in tensors:
        parts = tensor.split(".")[:-1]
        patterns.update(".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return patterns


@lru_cache(maxsize=8)
def list_module_names(shape: TransformerShape) -> tuple[str, ...]:
    """The names of all modules of the model, itself ("") first."""
    names = {"": None}
    for tensor in list_all_tensors(shape):
        parts = tensor.split(".")[:-1]
        for count in range(1, len(parts) + 1):
            # A dict, as an ordered set.
            names[".".join(parts[:count])] = None
    for layer in range(shape.num_layers):
        # It holds no parameters, so no tensor names it.
        names[f"blocks.{layer}.attention.core"] = None
    return tuple(names)


@lru_cache(maxsize=8)
def list_param_holders(shape: TransformerShape) -> tuple[ParamHolder, ...]:
    """The modules that hold parameters themselves."""
    by_module: dict[str, dict[str, Size]] = defaultdict(dict)
    for tensor, size in list_all_tensors(shape).items():
        owner, _, key = tensor.rpartition(".")
        by_module[owner][key] = size
    return tuple(_build_holder(name, sizes, shape) for name, sizes in by_module.items())


def _build_holder(name: str, sizes: dict[str, Size], shape: TransformerShape) -> ParamHolder:
    weight, num_params = sizes.get("weight", ()), sum(map(math.prod, sizes.values()))
    if len(weight) == 3:
        return ParamHolder(name, "grouped", num_params, *weight[1:])
    if name.endswith(".router"):
        return ParamHolder(name, "Router", num_params)
    if len(weight) == 2:
        kind = "linear"
        if name in ("embed", "embed_positions"):
            kind = "embedding"
        return ParamHolder(name, kind, num_params, *weight)
    if len(weight) == 4:
        return ParamHolder(name, "Conv2d", num_params)
    if not name:
        return ParamHolder(name, "model", num_params)
    return ParamHolder(
        name, {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[shape.norm], num_params
    )
