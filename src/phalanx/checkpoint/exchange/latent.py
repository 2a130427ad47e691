"""Keys of latent attention in DeepSeek's config.json, which no other family has.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.checkpoint.exchange.config_values import format_config_value
from phalanx.core.errors import LayoutError
from phalanx.job.shapes.decoder import DecoderShape


def convert_latent_attention_config_to_shape_keys(config: Mapping[str, Any]) -> dict[str, int]:
    """Keys of DecoderShape that config.json says in other words.

    Raises LayoutError for blocks with experts.
    """
    dense, layers = int(config["first_k_dense_replace"]), int(config["num_hidden_layers"])
    if dense < layers:
        raise LayoutError(
            f"config.json says that {layers - dense} of {layers} blocks have experts",
            why="phalanx reads the dense blocks of DeepSeek's models alone",
        )
    head_dim = int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])
    # null is a value here: queries are projected at once
    return {"query_rank": int(config["q_lora_rank"] or 0), "head_dim": head_dim}


def convert_latent_attention_shape_to_config(shape: DecoderShape) -> dict[str, Any]:
    """The keys that `convert_latent_attention_config_to_shape_keys` reads, and how many heads have
    keys of their own: all."""
    plain = shape.head_dim - shape.rope_head_dim
    return {
        "q_lora_rank": shape.query_rank or None,
        "qk_nope_head_dim": plain,
        "num_key_value_heads": shape.num_heads,
        "first_k_dense_replace": shape.num_layers,
    }


def compute_yarn_temperature_share(rope: Mapping[str, Any]) -> float:
    """The share of YaRN's temperature, which phalanx applies to whole queries and keys.

    Raises LayoutError if the configuration applies it elsewhere.
    """
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if not mscale or mscale != mscale_all_dim:
        raise LayoutError(
            f"config.json says mscale = {format_config_value(mscale)} and mscale_all_dim ="
            f" {format_config_value(mscale_all_dim)}, which phalanx's models do not compute",
            why=(
                "with latent attention YaRN's temperature is on whole queries and keys: both are"
                " given and equal"
            ),
        )
    return float(mscale)
