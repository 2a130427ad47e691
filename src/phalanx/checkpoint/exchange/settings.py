"""Between Hugging Face's config.json and a `ModelShape`, either way. Torch-free.

A setting that would make another computation is refused by name; whether a family can say a shape
is asked by saying it and reading it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from phalanx.checkpoint.exchange.families import Family, family_of, list_families
from phalanx.checkpoint.exchange.latent import latent_config, latent_values, yarn_mscale
from phalanx.core.errors import LayoutError
from phalanx.job.shape import ModelShape

Config = Mapping[str, Any]

# phalanx's activation with and without a gate, and what transformers calls it: the first name is
# the one written
ACTIVATIONS = {
    ("swiglu", ""): ("silu", "swish"),
    ("geglu", "gelu"): ("gelu",),
    ("geglu_tanh", "gelu_tanh"): ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"),
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # what nn.rotary knows
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
MAX_WIDTH, MAX_PARTS = 2**31, 1_000_000  # a config.json may say anything
MAY_BE_NONE = ("num_dense_layers", "balance_loss")
BIAS_RATE = 0.001  # DeepSeek-V3's; no config.json says it
SLIDING, FULL = "sliding_attention", "full_attention"


def shape_of_config(config: Config) -> ModelShape:
    """The shape that a config.json means.

    Raises LayoutError for what phalanx's models do not compute.
    """
    family = family_of(str(config.get("model_type")))
    try:
        return _shape(family, config)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise LayoutError(
            "config.json cannot be understood", why=f"{type(error).__name__}: {error}"
        ) from None


def _shape(family: Family, config: Config) -> ModelShape:
    told = {family.also.get(key, key): value for key, value in config.items() if value is not None}
    nulls = {key: None for key in family.nullable if key in config and config[key] is None}
    config = {**family.defaults, **told, **nulls}
    for key, wanted in family.required.items():
        if config.get(key, wanted) != wanted:
            raise _other(key, config[key], f"phalanx computes it with {wanted}")
    values: dict[str, Any] = dict(family.always)
    values |= {ours: config[theirs] for theirs, ours in family.widths.items() if theirs in config}
    if config.get("quantization_config"):
        raise LayoutError(
            "the weights are quantized", fix="import the directory that they were made of"
        )
    _require_numbers(values)
    if family.latent:
        values |= latent_values(config)
    values.setdefault("kind", "decoder")
    if values["kind"] == "vit":
        values |= {"vocab_size": 0, "tie_embeddings": False}
        values["num_classes"] = (
            len(config["id2label"]) if "id2label" in config else config.get("num_labels", 2)
        )
    values.setdefault("num_kv_heads", values["num_heads"])
    values.setdefault("head_dim", values["dim"] // values["num_heads"])
    values.setdefault("ffn_dim", values.get("expert_ffn_dim", 4 * values["dim"]))
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
        raise _other(
            family.scores_by,
            config[family.scores_by],
            f"phalanx divides by the head's {values['head_dim']}",
        )
    return normalize_shape(ModelShape(**values))


def _require_numbers(values: Mapping[str, Any]) -> None:
    """Numbers that a model can have, before anything is made of them. Raises ValueError."""
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


def _activation(theirs: str, is_gated: bool, key: str) -> str:
    for (gated, plain), names in ACTIVATIONS.items():
        if theirs in names and (gated if is_gated else plain):
            return gated if is_gated else plain
    raise _other(
        key,
        theirs,
        f"phalanx has {', '.join(name for names in ACTIVATIONS.values() for name in names)}",
    )


def _bias(family: Family, config: Config) -> str:
    found = {bool(config.get(key, False)) for key in family.biases}
    if len(found) > 1:
        raise LayoutError(
            f"{' and '.join(family.biases)} differ", why="phalanx's models have both or neither"
        )
    return "all" if found.pop() else "none"


def _window(family: Family, config: Config, num_layers: int) -> dict[str, int]:
    """The window, and which blocks are without."""
    window = int(config.get("sliding_window") or 0)
    if family.window == "all":
        return {"sliding_window": window}
    types = config.get("layer_types") or _layer_types(config, num_layers, window)
    if not window or SLIDING not in types:
        return {"sliding_window": 0}
    shape = ModelShape(num_layers, 0, 0, 0, 0, 0, 0, False, sliding_window=window)
    for every in (0, *range(2, num_layers + 1)):
        if layer_types(replace(shape, global_every=every)) == list(types):
            return {"sliding_window": window, "global_every": every}
    raise LayoutError(
        f"layer_types {list(types)} cannot be said",
        why="phalanx leaves out every n-th block's window",
    )


def _layer_types(config: Config, num_layers: int, window: int) -> list[str]:
    """What transformers takes where config.json has none."""
    if not config["use_sliding_window"]:
        return [FULL] * num_layers
    if "sliding_window_pattern" in config:
        every = int(config["sliding_window_pattern"])
        return [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(num_layers)]
    first = int(config["max_window_layers"])
    return [FULL if layer < first else SLIDING for layer in range(num_layers)]


def layer_types(shape: ModelShape) -> list[str]:
    """Block by block, in transformers' words."""
    return [SLIDING if shape.is_local(layer) else FULL for layer in range(shape.num_layers)]


def _rope(family: Family, config: Config, has_window: bool) -> dict[str, Any]:
    """Positions, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`
    (before)."""
    told = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if family.rope == "one":
        return _one_rope(family, told, config, float(config["rope_theta"]))
    by_type = told if {SLIDING, FULL} & set(told) else {FULL: told}
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


def _one_rope(family: Family, told: Config, config: Config, theta: float) -> dict[str, Any]:
    kind = told.get("rope_type") or told.get("type") or "default"
    if (
        float(told.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
        != 1.0
    ):
        raise _other(
            "partial_rotary_factor",
            told.get("partial_rotary_factor"),
            "phalanx rotates whole heads",
        )
    values: dict[str, Any] = {"rope_theta": float(told.get("rope_theta") or theta)}
    if kind == "default":
        return values | {"rope_scaling": "none"}
    if kind not in ("linear", "llama3", "yarn"):
        raise _other("rope_type", kind, "phalanx has default, linear, llama3 and yarn")
    values |= {"rope_scaling": kind, "rope_factor": float(told["factor"])}
    if family.latent and kind == "yarn":
        values["rope_mscale"] = yarn_mscale(told)
        told = {
            key: value for key, value in told.items() if key not in ("mscale", "mscale_all_dim")
        }
    if kind == "linear":
        return values
    for key, wanted in (LLAMA3 if kind == "llama3" else YARN).items():
        if (found := told.get(key)) is not None and found != wanted:
            raise _other(key, found, f"phalanx's {kind} has {wanted}")
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if told.get(key) is not None:
            raise _other(key, told[key], "phalanx takes the one that follows from the factor")
    original = told.get("original_max_position_embeddings") or config["max_position_embeddings"]
    return values | {"rope_original_len": int(original)}


def normalize_shape(shape: ModelShape) -> ModelShape:
    """The same computation in one way of saying it: what has no effect has its default."""
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
    """`normalize_shape`, without what training alone asks for: weights mean the same whatever evens
    out experts."""
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

    `max_positions`: the longest sequence that the model was trained on. `more`: what else to write,
    such as tokens.
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
    """What the family would compute otherwise: the configuration is read back and compared."""
    try:
        said = asdict(normalize_for_inference(_shape(family, config)))
    except (LayoutError, ValueError):  # also a family of experts, of a model that has none
        return [_NOTHING_ALIKE]
    reasons = [
        f"its {key} is {said[key]} and the model's {value}"
        for key, value in asdict(normalize_for_inference(shape)).items()
        if said[key] != value
    ]
    if family.heads_divide_dim and shape.dim % shape.num_heads:
        reasons.append(f"its {shape.num_heads} heads must divide dim {shape.dim}")
    return reasons


_NOTHING_ALIKE = "it has another kind of feed-forward or positions"


def _weight(reason: str) -> int:
    """Where even the words differ, nothing more is known than that."""
    return 100 if reason == _NOTHING_ALIKE or reason.startswith("its kind is") else 1


def _config(family: Family, shape: ModelShape, max_positions: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
    }
    config |= {theirs: getattr(shape, ours) for theirs, ours in family.widths.items()}
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
    return next(names[0] for ours, names in ACTIVATIONS.items() if activation in ours)


def _their_rope(family: Family, shape: ModelShape) -> dict[str, Any]:
    """In the words that transformers 4 and 5 both read, where there are such."""
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
    whole = {"rope_theta": shape.rope_theta, **scaling}
    return {"rope_parameters": {FULL: whole, SLIDING: dict(whole)}}


def _other(key: str, value: Any, why: str) -> LayoutError:
    return LayoutError(
        f"config.json says {key} = {value!r}, which phalanx's models do not compute", why=why
    )
