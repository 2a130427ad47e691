"""What the keys of a Hugging Face config.json may hold, looked at before anything computes with
them. Torch-free.

A config.json is a stranger's file: a key that is read is named with its value where it is no such
thing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.checkpoint.exchange.families import HuggingFaceFamily
from phalanx.core.errors import LayoutError
from phalanx.job.shapes.stored import MAX_FIGURE
from phalanx.job.shapes.stored_keys import STORED_SHAPE_DEFAULTS

ConfigJson = Mapping[str, Any]

SLIDING, FULL = "sliding_attention", "full_attention"  # types of layers, each with its own rotation

# A config.json may say anything: larger sizes are refused.
MAX_WIDTH = 2**31
_SHAPE_KEYS_THAT_MAY_BE_ZERO = ("num_dense_layers", "balance_loss")
# Sizes that follow from nothing else.
_NEEDED_SHAPE_KEYS = ("num_layers", "dim", "num_heads", "vocab_size")


@dataclass(frozen=True)
class ValueKind:
    """What a key may hold: `words` are those of the error for anything else."""

    words: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any, least: int, limit: float) -> bool:
    return type(value) is int and least <= value < limit


def _is_length(value: Any, limit: float) -> bool:
    # Tools that scale positions write 8192.0, too.
    is_whole = type(value) is int or (type(value) is float and value.is_integer())
    return is_whole and 1 <= value < limit


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < MAX_FIGURE


def _is_token_or_tokens(value: Any) -> bool:
    tokens = value if isinstance(value, list) else [value]
    # Llama's first releases have -1 for a token that there is not.
    return all(_is_whole(token, -1, MAX_WIDTH) for token in tokens)


def _is_table_of_labels(value: Any) -> bool:
    return isinstance(value, dict) and all(type(item) in (str, int) for item in value.values())


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


COUNT = ValueKind("a whole number from 1 on", lambda value: _is_whole(value, 1, MAX_WIDTH))
COUNT_OR_ZERO = ValueKind("a whole number from 0 on", lambda value: _is_whole(value, 0, MAX_WIDTH))
NUMBER = ValueKind("a finite number above 0", _is_number)
NUMBER_OR_ZERO = ValueKind(
    "a finite number from 0 on",
    lambda value: type(value) in (int, float) and 0 <= value < MAX_FIGURE,
)
FLAG = ValueKind("true or false", lambda value: isinstance(value, bool))
TEXT = ValueKind("a text", lambda value: isinstance(value, str))
OBJECT = ValueKind("an object", lambda value: isinstance(value, dict))
TEXTS = ValueKind("a list of texts", _is_list_of_texts)
TOKENS = ValueKind("a whole number or a list of them", _is_token_or_tokens)
LABELS = ValueKind("an object of names and numbers", _is_table_of_labels)

# Keys that are read of every family, where it has them.
_KIND_OF_KEY: Mapping[str, ValueKind] = {
    "max_position_embeddings": ValueKind(COUNT.words, lambda value: _is_length(value, MAX_FIGURE)),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), TOKENS),
    **dict.fromkeys(("id2label", "label2id"), LABELS),
}
_KIND_OF_LATENT_KEY: Mapping[str, ValueKind] = {
    **dict.fromkeys(("q_lora_rank", "first_k_dense_replace"), COUNT_OR_ZERO),
    "qk_nope_head_dim": COUNT,
}
_KIND_OF_WINDOW_KEY: Mapping[str, ValueKind] = {
    **dict.fromkeys(("sliding_window", "max_window_layers"), COUNT_OR_ZERO),
    "use_sliding_window": FLAG,
    "sliding_window_pattern": COUNT,
    "layer_types": TEXTS,
}
_ORIGINAL_LENGTH = ValueKind(COUNT.words, lambda value: _is_length(value, MAX_WIDTH))
_ROPE_OBJECT_KEYS = ("rope_parameters", "rope_scaling")
_KIND_OF_ROPE_KEY: Mapping[str, ValueKind] = {
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "partial_rotary_factor"), NUMBER),
    **dict.fromkeys(_ROPE_OBJECT_KEYS, OBJECT),
    "original_max_position_embeddings": _ORIGINAL_LENGTH,
}
_KIND_OF_ROPE_SETTING: Mapping[str, ValueKind] = {
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "factor"), NUMBER),
    **dict.fromkeys(("mscale", "mscale_all_dim"), NUMBER),
    "original_max_position_embeddings": _ORIGINAL_LENGTH,
    **dict.fromkeys(("rope_type", "type"), TEXT),
    **dict.fromkeys((FULL, SLIDING), OBJECT),
}


def require_config_values(family: HuggingFaceFamily, config: ConfigJson) -> None:
    """Raise LayoutError, with key and value, for what no key that is read of `family` may hold,
    and for a size that is not there."""
    kinds = _list_kinds_of_keys(family)
    for key, value in config.items():
        _require_kind(key, value, kinds.get(family.also.get(key, key)))
    if family.rope:
        for key in _ROPE_OBJECT_KEYS:
            _require_rope_settings(key, config.get(key) or {})
    names = {family.also.get(key, key) for key, value in config.items() if value is not None}
    for key, shape_key in family.widths.items():
        if shape_key in _NEEDED_SHAPE_KEYS and key not in names:
            raise LayoutError(f"config.json has no {key}")


def unsupported_config_key_error(key: str, value: Any, why: str) -> LayoutError:
    """The error for a setting of config.json that makes another computation."""
    text = format_config_value(value)
    return LayoutError(
        f"config.json says {key} = {text}, which phalanx's models do not compute", why=why
    )


def format_config_value(value: Any) -> str:
    """`value` as it stands in the file, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    if len(text) > 60:
        text = f"{text[:60]}..."
    return text


def _list_kinds_of_keys(family: HuggingFaceFamily) -> dict[str, ValueKind]:
    kinds = {**_KIND_OF_KEY, family.activation: TEXT, **dict.fromkeys(family.biases, FLAG)}
    if family.latent:
        kinds |= _KIND_OF_LATENT_KEY
    if family.window:
        kinds |= _KIND_OF_WINDOW_KEY
    if family.rope:
        kinds |= _KIND_OF_ROPE_KEY
    for key, shape_key in family.widths.items():
        kinds[key] = _find_kind_of_shape_key(shape_key)
    return kinds


def _find_kind_of_shape_key(shape_key: str) -> ValueKind:
    usual = STORED_SHAPE_DEFAULTS[shape_key]
    may_be_zero = shape_key in _SHAPE_KEYS_THAT_MAY_BE_ZERO
    if isinstance(usual, bool):
        return FLAG
    if isinstance(usual, float):
        return NUMBER_OR_ZERO if may_be_zero else NUMBER
    return COUNT_OR_ZERO if may_be_zero else COUNT


def _require_rope_settings(prefix: str, settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        _require_kind(f"{prefix}.{key}", value, _KIND_OF_ROPE_SETTING.get(key))
        if key in (FULL, SLIDING) and value:
            _require_rope_settings(f"{prefix}.{key}", value)


def _require_kind(key: str, value: Any, kind: ValueKind | None) -> None:
    # null is the default, whatever the key.
    if kind is not None and value is not None and not kind.holds(value):
        raise LayoutError(f"{key} is {format_config_value(value)}", fix=f"it must be {kind.words}")
