"""The stored form of a shape: one mapping with the keys of every kind of shape, in plans, run
directories, checkpoints and caches. A key that a shape has not stands there with its default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.job.shapes.measured import MeasuredModule
    from phalanx.job.shapes.transformer import TransformerShape

# In the order of the format. Removing or renaming a key breaks what is stored.
STORED_SHAPE_DEFAULTS: Mapping[str, Any] = {
    "num_layers": 0,
    "dim": 0,
    "num_heads": 0,
    "num_kv_heads": 0,
    "head_dim": 0,
    "ffn_dim": 0,
    "vocab_size": 0,
    "tie_embeddings": False,
    "kind": "decoder",
    "activation": "swiglu",
    "norm": "rmsnorm",
    "norm_eps": 1e-5,
    "norm_plus_one": False,
    "post_norms": False,
    "bias": "none",
    "qk_norm": False,
    "positions": "rope",
    "max_positions": 0,
    "rope_theta": 10000.0,
    "local_rope_theta": 0.0,
    "rope_scaling": "none",
    "rope_factor": 1.0,
    "rope_original_len": 0,
    "rope_mscale": 1.0,
    "sliding_window": 0,
    "global_every": 0,
    "scale_embeddings": False,
    "num_experts": 0,
    "experts_per_token": 0,
    "expert_ffn_dim": 0,
    "num_shared_experts": 0,
    "num_dense_layers": 0,
    "router_scores": "softmax",
    "router_normalize": True,
    "router_scale": 1.0,
    "expert_capacity": 0.0,
    "balance_loss": 0.0,
    "balance_bias": 0.0,
    "query_rank": 0,
    "kv_rank": 0,
    "rope_head_dim": 0,
    "value_head_dim": 0,
    "image_size": 0,
    "patch_size": 0,
    "num_channels": 0,
    "num_classes": 0,
    "pooling": "class_token",
    "measured": None,
}
REQUIRED_SHAPE_KEYS = tuple(STORED_SHAPE_DEFAULTS)[:8]


def complete_stored_keys(shape: TransformerShape | MeasuredModule) -> dict[str, Any]:
    """All keys of the format: those that `shape` has, and the defaults of the rest."""
    values = asdict(shape)
    return {key: values.get(key, default) for key, default in STORED_SHAPE_DEFAULTS.items()}
