"""Translates rotary positions between Hugging Face's config.json and a `DecoderShape`, either way.

Torch-free.
"""

from __future__ import annotations

from typing import Any

from phalanx.checkpoint.exchange.config_values import (
    FULL,
    SLIDING,
    ConfigJson,
    format_config_value,
    unsupported_config_key_error,
)
from phalanx.checkpoint.exchange.families import HuggingFaceFamily
from phalanx.checkpoint.exchange.latent import compute_yarn_temperature_share
from phalanx.core.errors import LayoutError
from phalanx.job.shapes.decoder import DecoderShape

# What nn.rotary computes with: a config.json may leave these out, but not differ.
LLAMA3_ROPE_DEFAULTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN_ROPE_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


def convert_rope_config_to_shape_keys(
    family: HuggingFaceFamily, config: ConfigJson, has_window: bool
) -> dict[str, Any]:
    """Keys of rotary positions, from `rope_parameters` (transformers 5) or `rope_theta` and
    `rope_scaling` (before). Of both, transformers takes the second one."""
    if family.rope == "one":
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        return _parse_rope_of_block_kind(family, rope, config, float(config["rope_theta"]))
    by_type = _merge_rope_of_block_kinds(config)
    values = _parse_rope_of_block_kind(
        family, by_type.get(FULL) or {}, config, float(config["rope_theta"])
    )
    local = _parse_rope_of_block_kind(
        family, by_type.get(SLIDING) or {}, config, float(config["rope_local_base_freq"])
    )
    if not has_window or local == values:
        return values
    if local["rope_scaling"] != "none":
        raise LayoutError(
            "rope_parameters of sliding_attention are scaled",
            why="phalanx scales those of other blocks",
        )
    return values | {"local_rope_theta": local["rope_theta"]}


def _merge_rope_of_block_kinds(config: ConfigJson) -> dict[str, ConfigJson]:
    """`rope_parameters` of each kind of block, with `rope_scaling` on top of full attention's.

    Raises LayoutError for settings that transformers would leave out in silence.
    """
    by_type = dict(config.get("rope_parameters") or {})
    scaling = config.get("rope_scaling") or {}
    if by_type and FULL not in by_type and SLIDING not in by_type:
        raise LayoutError(
            f"config.json says rope_parameters = {format_config_value(by_type)}",
            why=f"a model with windows reads those of {FULL} and {SLIDING}",
        )
    if FULL in scaling or SLIDING in scaling or ("type" in scaling and "rope_type" not in scaling):
        raise LayoutError(
            f"config.json says rope_scaling = {format_config_value(scaling)}",
            why=f"a model with windows reads its rope_type, and {FULL} of rope_parameters",
        )
    return by_type | {FULL: (by_type.get(FULL) or {}) | scaling}


def _parse_rope_of_block_kind(
    family: HuggingFaceFamily, rope: ConfigJson, config: ConfigJson, theta: float
) -> dict[str, Any]:
    """Keys of DecoderShape for one kind of block; `theta` is used where `rope` has none.

    Raises LayoutError for a setting that phalanx's models do not compute.
    """
    rotated_share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if float(rotated_share or 1.0) != 1.0:
        raise unsupported_config_key_error(
            "partial_rotary_factor", rotated_share, "phalanx rotates whole heads"
        )
    kind = rope.get("rope_type") or rope.get("type") or "default"
    values: dict[str, Any] = {"rope_theta": float(rope.get("rope_theta") or theta)}
    if kind == "default":
        return values | {"rope_scaling": "none"}
    if kind not in ("linear", "llama3", "yarn"):
        raise unsupported_config_key_error(
            "rope_type", kind, "phalanx has default, linear, llama3 and yarn"
        )
    values |= {"rope_scaling": kind, "rope_factor": float(_require_setting(rope, "factor"))}
    if family.latent and kind == "yarn":
        values["rope_mscale"] = compute_yarn_temperature_share(rope)
        rope = dict(rope)
        # They are in `rope_mscale` now: `_require_known_rope_scaling_constants` would refuse them.
        del rope["mscale"], rope["mscale_all_dim"]
    if kind == "linear":
        if family.latent and rope.get("mscale_all_dim") is not None:
            raise unsupported_config_key_error(
                "mscale_all_dim", rope["mscale_all_dim"], "phalanx's linear has no temperature"
            )
        return values
    _require_known_rope_scaling_constants(rope, kind)
    return values | {"rope_original_len": _find_original_length(family, rope, config)}


def _find_original_length(family: HuggingFaceFamily, rope: ConfigJson, config: ConfigJson) -> int:
    """The length that a model was trained on before its positions were scaled."""
    key = "original_max_position_embeddings"
    length = rope.get(key) or _require_setting(config, "max_position_embeddings")
    if family.rope == "one":
        # transformers prefers the one beside `rope_scaling`, where Phi 3 has it.
        length = config.get(key) or length
    return int(length)


def _require_setting(settings: ConfigJson, key: str) -> Any:
    if settings.get(key) is None:
        raise LayoutError(f"config.json has no {key}")
    return settings[key]


def _require_known_rope_scaling_constants(rope: ConfigJson, kind: str) -> None:
    """Raise LayoutError unless the constants of a scaling are those that phalanx computes with."""
    constants = {"llama3": LLAMA3_ROPE_DEFAULTS, "yarn": YARN_ROPE_DEFAULTS}[kind]
    for key, required in constants.items():
        value = rope.get(key)
        if value is not None and value != required:
            raise unsupported_config_key_error(key, value, f"phalanx's {kind} has {required}")
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if rope.get(key) is not None:
            raise unsupported_config_key_error(
                key, rope[key], "phalanx takes the one that follows from the factor"
            )


def convert_rope_shape_to_config(family: HuggingFaceFamily, shape: DecoderShape) -> dict[str, Any]:
    """Keys of rotary positions that transformers 4 and 5 both read, where there are such."""
    scaling = None
    if shape.rope_scaling != "none":
        scaling = _convert_rope_scaling_to_config(family, shape)
    if family.rope == "one":
        return {"rope_theta": shape.rope_theta, "rope_scaling": scaling}
    if scaling is None or shape.local_rope_theta:
        local = shape.local_rope_theta or shape.rope_theta
        return {
            "rope_theta": shape.rope_theta,
            "rope_local_base_freq": local,
            "rope_scaling": scaling,
        }
    parameters = {"rope_theta": shape.rope_theta, **scaling}
    return {"rope_parameters": {FULL: parameters, SLIDING: dict(parameters)}}


def _convert_rope_scaling_to_config(
    family: HuggingFaceFamily, shape: DecoderShape
) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": shape.rope_scaling, "factor": shape.rope_factor}
    if shape.rope_original_len:
        scaling["original_max_position_embeddings"] = shape.rope_original_len
    if shape.rope_scaling == "llama3":
        scaling |= LLAMA3_ROPE_DEFAULTS
    if family.latent and shape.rope_scaling == "yarn":
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), shape.rope_mscale)
    return scaling
