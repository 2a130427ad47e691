"""Translates between Hugging Face's config.json and the shape of a model, either way. Torch-free.

A setting that would make another computation is refused by name. A family can describe a shape if
its config.json, written and read back, is the same computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from phalanx.checkpoint.exchange.config_values import (
    FULL,
    SLIDING,
    ConfigJson,
    format_config_value,
    require_config_values,
    unsupported_config_key_error,
)
from phalanx.checkpoint.exchange.families import (
    HuggingFaceFamily,
    find_family_of_model_type,
    list_hugging_face_families,
)
from phalanx.checkpoint.exchange.latent import (
    convert_latent_attention_config_to_shape_keys,
    convert_latent_attention_shape_to_config,
)
from phalanx.checkpoint.exchange.rope_settings import (
    convert_rope_config_to_shape_keys,
    convert_rope_shape_to_config,
)
from phalanx.core.errors import LayoutError
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.job.shapes.stored import build_builtin_shape
from phalanx.job.shapes.stored_keys import STORED_SHAPE_DEFAULTS
from phalanx.job.shapes.transformer import TransformerShape

# phalanx's activation with and without a gate, and transformers' names of it: the first one is
# written
HF_ACTIVATION_NAMES = {
    ("swiglu", ""): ("silu", "swish"),
    ("geglu", "gelu"): ("gelu",),
    ("geglu_tanh", "gelu_tanh"): ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"),
}
# A config.json may say anything: more matrices are refused.
MAX_PARTS = 1_000_000
# DeepSeek-V3's; no config.json says it.
DEFAULT_ROUTER_BIAS_RATE = 0.001


def convert_config_to_model_shape(config: ConfigJson) -> TransformerShape:
    """The shape that a config.json means.

    Raises LayoutError for what phalanx's models do not compute.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise LayoutError(
            f"model_type is {format_config_value(model_type)}", fix="it must be a family's name"
        )
    return _convert_family_config_to_shape(find_family_of_model_type(model_type), config)


def _convert_family_config_to_shape(
    family: HuggingFaceFamily, config: ConfigJson
) -> TransformerShape:
    require_config_values(family, config)
    config = _rename_config_keys_and_fill_defaults(family, config)
    for key, required in family.required.items():
        if config.get(key, required) != required:
            raise unsupported_config_key_error(
                key, config[key], f"phalanx computes it with {format_config_value(required)}"
            )
    values: dict[str, Any] = dict(family.always)
    for key, shape_key in family.widths.items():
        if key in config:
            values[shape_key] = config[key]
    if config.get("quantization_config"):
        raise LayoutError(
            "the weights are quantized", fix="import the directory that they were made of"
        )
    _require_possible_numbers_of_parts(values)
    if family.latent:
        values |= convert_latent_attention_config_to_shape_keys(config)
    _add_derived_shape_keys(values, config)
    values["activation"] = _convert_config_activation(family, str(config[family.activation]))
    if family.biases:
        values["bias"] = _convert_config_bias(family, config)
    if family.window:
        values |= _convert_config_sliding_window(family, config, values["num_layers"])
    if family.rope:
        values |= convert_rope_config_to_shape_keys(
            family, config, bool(values.get("sliding_window"))
        )
    if family.scores_by and config[family.scores_by] != values["head_dim"]:
        raise unsupported_config_key_error(
            family.scores_by,
            config[family.scores_by],
            f"phalanx divides by the head's {values['head_dim']}",
        )
    return normalize_shape_to_canonical_form(build_builtin_shape(values))


def _rename_config_keys_and_fill_defaults(
    family: HuggingFaceFamily, config: ConfigJson
) -> dict[str, Any]:
    """`config` in the family's own names, with its defaults in place of what is left out or null;
    where null is a value it stays."""
    filled = dict(family.defaults)
    for key, value in config.items():
        if value is not None:
            filled[family.also.get(key, key)] = value
    for key in family.nullable:
        if key in config and config[key] is None:
            filled[key] = None
    return filled


def _add_derived_shape_keys(values: dict[str, Any], config: ConfigJson) -> None:
    """Add the keys of a shape that follow from other ones."""
    values.setdefault("kind", "decoder")
    if values["kind"] == "vit":
        values |= {"vocab_size": 0, "tie_embeddings": False}
        # Without the key transformers takes 2.
        values["num_classes"] = config.get("num_labels", 2)
        if "id2label" in config:
            # The num_labels of transformers is the number of names.
            values["num_classes"] = len(config["id2label"])
    values.setdefault("num_kv_heads", values["num_heads"])
    values.setdefault("head_dim", values["dim"] // values["num_heads"])
    values.setdefault("ffn_dim", values.get("expert_ffn_dim", 4 * values["dim"]))


def _require_possible_numbers_of_parts(values: Mapping[str, Any]) -> None:
    """Raise LayoutError for numbers of blocks and experts that no model has together."""
    layers, experts = values["num_layers"], values.get("num_experts", 1)
    if layers * experts > MAX_PARTS:
        each = f" of {experts:,} experts" if experts > 1 else ""
        raise LayoutError(f"config.json says {layers:,} blocks{each}", why="no model has as many")
    visited = values.get("experts_per_token", 0)
    if visited > values.get("num_experts", 0):
        raise LayoutError(f"config.json says that a token visits {visited} of {experts} experts")
    dense = values.get("num_dense_layers", 0)
    if dense >= layers:
        raise LayoutError(f"config.json says that {dense} of {layers} blocks have no experts")


def _convert_config_activation(family: HuggingFaceFamily, name: str) -> str:
    known: list[str] = []
    for (gated, plain), names in HF_ACTIVATION_NAMES.items():
        activation = gated if family.has_gated_feed_forward else plain
        if family.activations.get(name, name) in names and activation:
            return activation
        known += names
    raise unsupported_config_key_error(family.activation, name, f"phalanx has {', '.join(known)}")


def _convert_config_bias(family: HuggingFaceFamily, config: ConfigJson) -> str:
    biases = {bool(config.get(key, False)) for key in family.biases}
    if len(biases) > 1:
        raise LayoutError(
            f"{' and '.join(family.biases)} differ", why="phalanx's models have both or neither"
        )
    if biases == {True}:
        return "all"
    return "none"


def _convert_config_sliding_window(
    family: HuggingFaceFamily, config: ConfigJson, num_layers: int
) -> dict[str, int]:
    """The width of the window, and the interval of blocks without one."""
    window = int(config.get("sliding_window") or 0)
    if family.window == "all":
        return {"sliding_window": window}
    types = config.get("layer_types") or _derive_default_layer_types(family, config, num_layers)
    if not window or SLIDING not in types:
        return {"sliding_window": 0}
    if len(types) != num_layers:
        raise LayoutError(f"layer_types names {len(types):,} blocks, and there are {num_layers:,}")
    shape = DecoderShape(num_layers, 0, 0, 0, 0, 0, 0, False, sliding_window=window)
    # 0: each block has a window. n: each but every n-th; with 1 there would be no window at all.
    # So the first block without one says n.
    interval = types.index(FULL) + 1 if FULL in types else 0
    if list_attention_layer_types(replace(shape, global_every=interval)) == list(types):
        return {"sliding_window": window, "global_every": interval}
    raise LayoutError(
        f"layer_types {format_config_value(types)} cannot be said",
        why="phalanx leaves out every n-th block's window",
    )


def _derive_default_layer_types(
    family: HuggingFaceFamily, config: ConfigJson, num_layers: int
) -> list[str]:
    """The layer types that transformers takes where config.json has none.

    A key without a default is none that the family reads.
    """
    if "use_sliding_window" in family.defaults and not config["use_sliding_window"]:
        return [FULL] * num_layers
    types = [SLIDING] * num_layers
    if "sliding_window_pattern" in family.defaults:
        interval = int(config["sliding_window_pattern"])
        for layer in range(num_layers):
            if (layer + 1) % interval == 0:
                types[layer] = FULL
        return types
    for layer in range(min(num_layers, int(config["max_window_layers"]))):
        types[layer] = FULL
    return types


def list_attention_layer_types(shape: DecoderShape) -> list[str]:
    """The layer type of each block, in transformers' words."""
    types = [FULL] * shape.num_layers
    for layer in range(shape.num_layers):
        if shape.is_local(layer):
            types[layer] = SLIDING
    return types


def normalize_shape_to_canonical_form(shape: TransformerShape) -> TransformerShape:
    """The same computation in one canonical form: keys without effect have their defaults."""
    if not isinstance(shape, DecoderShape):
        return shape
    changes: dict[str, Any] = {}
    # This one is another base, and nothing else.
    if shape.rope_scaling == "ntk":
        # Frequencies are theta^(-2i / d): the lowest is divided by the factor, the highest stays.
        theta = shape.rope_theta * shape.rope_factor ** (
            shape.rotated_dim / (shape.rotated_dim - 2)
        )
        changes |= {"rope_scaling": "none", "rope_theta": theta}
    if changes.get("rope_scaling", shape.rope_scaling) == "none":
        changes["rope_factor"] = STORED_SHAPE_DEFAULTS["rope_factor"]
    if shape.rope_scaling not in ("llama3", "yarn"):
        changes["rope_original_len"] = 0
    if shape.rope_scaling != "yarn":
        changes["rope_mscale"] = STORED_SHAPE_DEFAULTS["rope_mscale"]
    if shape.positions != "rope":
        changes |= {
            "rope_theta": STORED_SHAPE_DEFAULTS["rope_theta"],
            "rope_scaling": "none",
            "rope_factor": 1.0,
            "rope_original_len": 0,
        }
    if not shape.num_local_layers:
        changes |= {"sliding_window": 0, "global_every": 0, "local_rope_theta": 0.0}
    elif shape.num_local_layers == shape.num_layers:
        changes["global_every"] = 0
    if shape.local_rope_theta == shape.rope_theta and shape.rope_scaling == "none":
        changes["local_rope_theta"] = 0.0
    if shape.num_experts and not shape.num_dense_layers:
        changes["ffn_dim"] = shape.expert_ffn_dim
    return replace(shape, **changes)


def normalize_shape_for_inference(shape: TransformerShape) -> TransformerShape:
    """`normalize_shape_to_canonical_form`, without the keys that only training reads: weights mean
    the same whatever balances experts."""
    shape = normalize_shape_to_canonical_form(shape)
    if not isinstance(shape, DecoderShape):
        return shape
    # Only whether there is a bias matters: it is a tensor of the weights, at whatever rate.
    rate = 0.0
    if shape.balance_bias:
        rate = DEFAULT_ROUTER_BIAS_RATE
    return replace(shape, balance_loss=0.0, balance_bias=rate)


def build_hugging_face_config(
    shape: TransformerShape, *, max_positions: int = 0, more: ConfigJson | None = None
) -> dict[str, Any]:
    """The config.json of the first family that computes what the shape says.

    Raises LayoutError if none does.

    `max_positions`: the longest sequence that the model was trained on. `more`: other keys to
    write, such as tokens.
    """
    shape = normalize_shape_to_canonical_form(shape)
    wrong: dict[str, list[str]] = {}
    for family in list_hugging_face_families():
        config = _build_family_config(family, shape, max_positions)
        reasons = _find_config_differences(family, config, shape)
        if not reasons:
            return {**config, **(more or {})}
        wrong[family.architecture] = reasons
    # By the kind of model first, then by the number of keys that differ.
    nearest = min(
        wrong, key=lambda name: (sum(map(_weigh_config_difference, wrong[name])), len(wrong[name]))
    )
    raise LayoutError(
        "no model of transformers that is known here computes what this one does",
        why=f"nearest is {nearest}, but {', '.join(wrong[nearest])}",
        fix="phalanx.load_weights fills phalanx's own module",
    )


def _find_config_differences(
    family: HuggingFaceFamily, config: ConfigJson, shape: TransformerShape
) -> list[str]:
    """The keys that the family would compute otherwise: the configuration is read back and
    compared."""
    try:
        read_back = normalize_shape_for_inference(
            _convert_family_config_to_shape(family, config)
        ).to_json()
    except LayoutError:
        # Also a family of experts, of a model that has none.
        return [_DIFFERENT_ARCHITECTURE_REASON]
    reasons = []
    for key, value in normalize_shape_for_inference(shape).to_json().items():
        if read_back[key] != value:
            reasons.append(f"its {key} is {read_back[key]} and the model's {value}")
    if family.heads_divide_dim and shape.dim % shape.num_heads:
        reasons.append(f"its {shape.num_heads} heads must divide dim {shape.dim}")
    return reasons


_DIFFERENT_ARCHITECTURE_REASON = "it has another kind of feed-forward or positions"


def _weigh_config_difference(reason: str) -> int:
    """The weight of a reason: a family of another kind is farther away than any single key."""
    if reason == _DIFFERENT_ARCHITECTURE_REASON or reason.startswith("its kind is"):
        return 100
    return 1


def _build_family_config(
    family: HuggingFaceFamily, shape: TransformerShape, max_positions: int
) -> dict[str, Any]:
    numbers, decoder = shape.to_json(), _fill_decoder_defaults(shape)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
    }
    for key, shape_key in family.widths.items():
        config[key] = numbers[shape_key]
    config[family.activation] = _convert_activation_to_config(shape.activation)
    config |= {
        **dict.fromkeys(family.biases, shape.bias == "all"),
        **family.required,
        **family.written,
    }
    if family.latent:
        config |= convert_latent_attention_shape_to_config(decoder)
    if family.scores_by:
        config[family.scores_by] = shape.head_dim
    if shape.reads_images and "num_labels" in config:
        config |= {"id2label": {}, "label2id": {}}
        for number in range(config.pop("num_labels")):
            config["id2label"][str(number)] = f"LABEL_{number}"
            config["label2id"][f"LABEL_{number}"] = number
    if family.window:
        config["sliding_window"] = decoder.sliding_window or None
    if family.window == "layer_types":
        config["layer_types"] = list_attention_layer_types(decoder)
    if "use_sliding_window" in family.defaults and family.window:
        config["use_sliding_window"] = decoder.sliding_window > 0
    if family.rope:
        length = max(max_positions, int(decoder.rope_original_len * decoder.rope_factor), 1)
        config |= {"max_position_embeddings": length} | convert_rope_shape_to_config(
            family, decoder
        )
    return config


def _fill_decoder_defaults(shape: TransformerShape) -> DecoderShape:
    """`shape` with a decoder's defaults for what it has not: every family is tried for it."""
    if isinstance(shape, DecoderShape):
        return shape
    names = {field.name for field in fields(DecoderShape)}
    return DecoderShape(**{key: v for key, v in shape.to_json().items() if key in names})


def _convert_activation_to_config(activation: str) -> str:
    for known, names in HF_ACTIVATION_NAMES.items():
        if activation in known:
            return names[0]
    raise AssertionError(f"transformers has no name for {activation}")
