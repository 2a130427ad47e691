"""Translates between Hugging Face's config.json and a `ModelShape`, either way. Torch-free.

A setting that would make another computation is refused by name. A family can describe a shape if
its config.json, written and read back, is the same computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from phalanx.checkpoint.exchange.families import Family, find_family, list_families
from phalanx.checkpoint.exchange.latent import latent_config, latent_values, yarn_mscale
from phalanx.core.errors import LayoutError
from phalanx.job.shape import ModelShape

Config = Mapping[str, Any]

# phalanx's activation with and without a gate, and transformers' names of it: the first one is
# written
ACTIVATIONS = {
    ("swiglu", ""): ("silu", "swish"),
    ("geglu", "gelu"): ("gelu",),
    ("geglu_tanh", "gelu_tanh"): ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"),
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # the values of nn.rotary
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
MAX_WIDTH, MAX_PARTS = 2**31, 1_000_000  # a config.json may say anything
MAY_BE_NONE = ("num_dense_layers", "balance_loss")
BIAS_RATE = 0.001  # DeepSeek-V3's; no config.json says it
SLIDING, FULL = "sliding_attention", "full_attention"


def shape_of_config(config: Config) -> ModelShape:
    """The shape that a config.json means.

    Raises LayoutError for what phalanx's models do not compute.
    """
    family = find_family(str(config.get("model_type")))
    try:
        return _shape(family, config)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise LayoutError(
            "config.json cannot be understood", why=f"{type(error).__name__}: {error}"
        ) from None


def _shape(family: Family, config: Config) -> ModelShape:
    not_null = {
        family.also.get(key, key): value for key, value in config.items() if value is not None
    }
    nulls = {key: None for key in family.nullable if key in config and config[key] is None}
    config = {**family.defaults, **not_null, **nulls}
    for key, required in family.required.items():
        if config.get(key, required) != required:
            raise _unsupported(key, config[key], f"phalanx computes it with {required}")
    values: dict[str, Any] = dict(family.always)
    present = [key for key in family.widths if key in config]
    values |= {family.widths[key]: config[key] for key in present}
    if config.get("quantization_config"):
        raise LayoutError(
            "the weights are quantized", fix="import the directory that they were made of"
        )
    _require_numbers(values)
    if family.latent:
        values |= latent_values(config)
    _fill_defaults(values, config)
    values["activation"] = _activation(
        str(config[family.activation]), family.is_gated, family.activation
    )
    if family.biases:
        values["bias"] = _bias(family, config)
    if family.window:
        values |= _window(family, config, values["num_layers"])
    if family.rope:
        values |= _rope(family, config, bool(values.get("sliding_window")))
    if family.scores_by and config[family.scores_by] != values["head_dim"]:
        raise _unsupported(
            family.scores_by,
            config[family.scores_by],
            f"phalanx divides by the head's {values['head_dim']}",
        )
    return normalize_shape(ModelShape(**values))


def _fill_defaults(values: dict[str, Any], config: Config) -> None:
    """Add the keys of ModelShape that follow from other ones."""
    values.setdefault("kind", "decoder")
    if values["kind"] == "vit":
        values |= {"vocab_size": 0, "tie_embeddings": False}
        values["num_classes"] = (
            len(config["id2label"]) if "id2label" in config else config.get("num_labels", 2)
        )
    values.setdefault("num_kv_heads", values["num_heads"])
    values.setdefault("head_dim", values["dim"] // values["num_heads"])
    values.setdefault("ffn_dim", values.get("expert_ffn_dim", 4 * values["dim"]))


def _require_numbers(values: Mapping[str, Any]) -> None:
    """Raise ValueError for numbers that no model can have, before they are computed with."""
    for key, value in values.items():
        usual = getattr(ModelShape, key, None)
        if isinstance(usual, str):
            continue
        if isinstance(usual, bool) or key == "tie_embeddings":
            fits = isinstance(value, bool)
        else:
            kinds = int | float if isinstance(usual, float) else int
            fits = (
                isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value < MAX_WIDTH
            )
            fits = fits and (value > 0 or key in MAY_BE_NONE)
        if not fits:
            raise ValueError(f"{key} {value!r}")
    if values["num_layers"] * values.get("num_experts", 1) > MAX_PARTS:
        raise ValueError(f"{values['num_layers']} blocks of {values.get('num_experts', 1)} experts")
    if values.get("experts_per_token", 0) > values.get("num_experts", 0):
        raise ValueError(
            f"a token visits {values['experts_per_token']} of {values['num_experts']} experts"
        )
    if values.get("num_dense_layers", 0) >= values["num_layers"]:
        raise ValueError(
            f"{values['num_dense_layers']} of {values['num_layers']} blocks have no experts"
        )


def _activation(name: str, is_gated: bool, key: str) -> str:
    for (gated, plain), names in ACTIVATIONS.items():
        if name in names and (gated if is_gated else plain):
            return gated if is_gated else plain
    raise _unsupported(
        key,
        name,
        f"phalanx has {', '.join(known for names in ACTIVATIONS.values() for known in names)}",
    )


def _bias(family: Family, config: Config) -> str:
    biases = {bool(config.get(key, False)) for key in family.biases}
    if len(biases) > 1:
        raise LayoutError(
            f"{' and '.join(family.biases)} differ", why="phalanx's models have both or neither"
        )
    return "all" if biases.pop() else "none"


def _window(family: Family, config: Config, num_layers: int) -> dict[str, int]:
    """The width of the window, and the interval of blocks without one."""
    window = int(config.get("sliding_window") or 0)
    if family.window == "all":
        return {"sliding_window": window}
    types = config.get("layer_types") or _layer_types(config, num_layers, window)
    if not window or SLIDING not in types:
        return {"sliding_window": 0}
    shape = ModelShape(num_layers, 0, 0, 0, 0, 0, 0, False, sliding_window=window)
    for interval in (0, *range(2, num_layers + 1)):
        if layer_types(replace(shape, global_every=interval)) == list(types):
            return {"sliding_window": window, "global_every": interval}
    raise LayoutError(
        f"layer_types {list(types)} cannot be said",
        why="phalanx leaves out every n-th block's window",
    )


def _layer_types(config: Config, num_layers: int, window: int) -> list[str]:
    """The layer types that transformers takes where config.json has none."""
    if not config["use_sliding_window"]:
        return [FULL] * num_layers
    if "sliding_window_pattern" in config:
        interval = int(config["sliding_window_pattern"])
        return [FULL if (layer + 1) % interval == 0 else SLIDING for layer in range(num_layers)]
    first = int(config["max_window_layers"])
    return [FULL if layer < first else SLIDING for layer in range(num_layers)]


def layer_types(shape: ModelShape) -> list[str]:
    """The layer type of each block, in transformers' words."""
    return [SLIDING if shape.is_local(layer) else FULL for layer in range(shape.num_layers)]


def _rope(family: Family, config: Config, has_window: bool) -> dict[str, Any]:
    """Keys of rotary positions, from `rope_parameters` (transformers 5) or `rope_theta` and
    `rope_scaling` (before)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if family.rope == "one":
        return _one_rope(family, rope, config, float(config["rope_theta"]))
    by_type = rope if {SLIDING, FULL} & set(rope) else {FULL: rope}
    values = _one_rope(family, by_type.get(FULL) or {}, config, float(config["rope_theta"]))
    local = _one_rope(
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


def _one_rope(family: Family, rope: Config, config: Config, theta: float) -> dict[str, Any]:
    """Keys of ModelShape for one kind of block; `theta` is used where `rope` has none.

    Raises LayoutError for a setting that phalanx's models do not compute.
    """
    rotated_share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if float(rotated_share or 1.0) != 1.0:
        share = rope.get("partial_rotary_factor")
        raise _unsupported("partial_rotary_factor", share, "phalanx rotates whole heads")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    values: dict[str, Any] = {"rope_theta": float(rope.get("rope_theta") or theta)}
    if kind == "default":
        return values | {"rope_scaling": "none"}
    if kind not in ("linear", "llama3", "yarn"):
        raise _unsupported("rope_type", kind, "phalanx has default, linear, llama3 and yarn")
    values |= {"rope_scaling": kind, "rope_factor": float(rope["factor"])}
    if family.latent and kind == "yarn":
        values["rope_mscale"] = yarn_mscale(rope)
        rope = {key: rope[key] for key in rope if key not in ("mscale", "mscale_all_dim")}
    if kind == "linear":
        return values
    _require_constants(rope, kind)
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    return values | {"rope_original_len": int(original)}


def _require_constants(rope: Config, kind: str) -> None:
    """Raise LayoutError unless the constants of a scaling are those that phalanx computes with."""
    for key, required in (LLAMA3 if kind == "llama3" else YARN).items():
        value = rope.get(key)
        if value is not None and value != required:
            raise _unsupported(key, value, f"phalanx's {kind} has {required}")
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if rope.get(key) is not None:
            raise _unsupported(key, rope[key], "phalanx takes the one that follows from the factor")


def normalize_shape(shape: ModelShape) -> ModelShape:
    """The same computation in one canonical form: keys without effect have their defaults."""
    changes: dict[str, Any] = {}
    blank = ModelShape(0, 0, 0, 0, 0, 0, 0, False)
    if shape.rope_scaling == "ntk":  # another base, and nothing else
        theta = shape.rope_theta * shape.rope_factor ** (
            shape.rotated_dim / (shape.rotated_dim - 2)
        )
        changes |= {"rope_scaling": "none", "rope_theta": theta}
    if changes.get("rope_scaling", shape.rope_scaling) == "none":
        changes["rope_factor"] = blank.rope_factor
    if shape.rope_scaling not in ("llama3", "yarn"):
        changes["rope_original_len"] = 0
    if shape.rope_scaling != "yarn":
        changes["rope_mscale"] = blank.rope_mscale
    if shape.positions != "rope" or shape.reads_images:
        changes |= {
            "rope_theta": blank.rope_theta,
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


def normalize_for_inference(shape: ModelShape) -> ModelShape:
    """`normalize_shape`, without the keys that only training reads: weights mean the same whatever
    balances experts."""
    return replace(
        normalize_shape(shape),
        balance_loss=0.0,
        balance_bias=BIAS_RATE if shape.balance_bias else 0.0,
    )


def config_of_shape(
    shape: ModelShape, *, max_positions: int = 0, more: Config | None = None
) -> dict[str, Any]:
    """The config.json of the first family that computes what the shape says.

    Raises LayoutError if none does.

    `max_positions`: the longest sequence that the model was trained on. `more`: other keys to
    write, such as tokens.
    """
    shape = normalize_shape(shape)
    wrong: dict[str, list[str]] = {}
    for family in list_families():
        config = _config(family, shape, max_positions)
        reasons = _reasons(family, config, shape)
        if not reasons:
            return {**config, **(more or {})}
        wrong[family.architecture] = reasons
    nearest = min(wrong, key=lambda name: (sum(map(_weight, wrong[name])), len(wrong[name])))
    raise LayoutError(
        "no model of transformers that is known here computes what this one does",
        why=f"nearest is {nearest}, but {', '.join(wrong[nearest])}",
        fix="phalanx.load_weights fills phalanx's own module",
    )


def _reasons(family: Family, config: Config, shape: ModelShape) -> list[str]:
    """The keys that the family would compute otherwise: the configuration is read back and
    compared."""
    try:
        read_back = asdict(normalize_for_inference(_shape(family, config)))
    except (LayoutError, ValueError):  # also a family of experts, of a model that has none
        return [_NOTHING_ALIKE]
    reasons = [
        f"its {key} is {read_back[key]} and the model's {value}"
        for key, value in asdict(normalize_for_inference(shape)).items()
        if read_back[key] != value
    ]
    if family.heads_divide_dim and shape.dim % shape.num_heads:
        reasons.append(f"its {shape.num_heads} heads must divide dim {shape.dim}")
    return reasons


_NOTHING_ALIKE = "it has another kind of feed-forward or positions"


def _weight(reason: str) -> int:
    """The weight of a reason: a family of another kind is farther away than any single key."""
    return 100 if reason == _NOTHING_ALIKE or reason.startswith("its kind is") else 1


def _config(family: Family, shape: ModelShape, max_positions: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
    }
    config |= {key: getattr(shape, shape_key) for key, shape_key in family.widths.items()}
    config[family.activation] = _their_activation(shape.activation)
    config |= {
        **dict.fromkeys(family.biases, shape.bias == "all"),
        **family.required,
        **family.written,
    }
    if family.latent:
        config |= latent_config(shape)
    if family.scores_by:
        config[family.scores_by] = shape.head_dim
    if shape.reads_images and "num_labels" in config:
        labels = [f"LABEL_{number}" for number in range(config.pop("num_labels"))]
        config |= {"id2label": {str(number): label for number, label in enumerate(labels)}}
        config |= {"label2id": {label: number for number, label in enumerate(labels)}}
    if family.window:
        config["sliding_window"] = shape.sliding_window or None
    if family.window == "layer_types":
        config |= {
            "use_sliding_window": shape.sliding_window > 0,
            "layer_types": layer_types(shape),
        }
    if family.rope:
        length = max(max_positions, int(shape.rope_original_len * shape.rope_factor), 1)
        config |= {"max_position_embeddings": length} | _their_rope(family, shape)
    return config


def _their_activation(activation: str) -> str:
    return next(names[0] for known, names in ACTIVATIONS.items() if activation in known)


def _their_rope(family: Family, shape: ModelShape) -> dict[str, Any]:
    """Keys of rotary positions that transformers 4 and 5 both read, where there are such."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    if shape.rope_scaling != "none":
        scaling = {"rope_type": shape.rope_scaling, "factor": shape.rope_factor}
        scaling |= (
            {"original_max_position_embeddings": shape.rope_original_len}
            if shape.rope_original_len
            else {}
        )
        scaling |= LLAMA3 if shape.rope_scaling == "llama3" else {}
        if family.latent and shape.rope_scaling == "yarn":
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), shape.rope_mscale)
    is_scaled = shape.rope_scaling != "none"
    if family.rope == "one":
        return {"rope_theta": shape.rope_theta, "rope_scaling": scaling if is_scaled else None}
    if not is_scaled or shape.local_rope_theta:
        local = shape.local_rope_theta or shape.rope_theta
        return {
            "rope_theta": shape.rope_theta,
            "rope_local_base_freq": local,
            "rope_scaling": scaling if is_scaled else None,
        }
    parameters = {"rope_theta": shape.rope_theta, **scaling}
    return {"rope_parameters": {FULL: parameters, SLIDING: dict(parameters)}}


def _unsupported(key: str, value: Any, why: str) -> LayoutError:
    return LayoutError(
        f"config.json says {key} = {value!r}, which phalanx's models do not compute", why=why
    )
