"""Plain values, and a model's shape, as TOML. Reading is tomllib's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from phalanx.core.printable import escape_controls
from phalanx.job.model import DEFAULT_PRESETS, SHAPE_KEYS
from phalanx.job.presets import find_preset
from phalanx.job.shapes.stored_keys import STORED_SHAPE_DEFAULTS
from phalanx.job.shapes.transformer import TransformerShape

_BARE_KEY_PATTERN = re.compile(r"[A-Za-z0-9_-]+")


def format_toml_value(value: Any) -> str:
    """A string, number, truth value, list or table of such as one line of TOML; None is the word
    "none"."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):  # before int, which a bool is as well
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL.
        return escape_controls(json.dumps(value, ensure_ascii=False))
    if isinstance(value, int | float):
        # The shortest text that reads back as the same float.
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(format_toml_value(item) for item in value)}]"
    assert isinstance(value, dict), f"TOML has no {type(value).__name__}"
    pairs = []
    for key, item in value.items():
        # TOML has no null; inside of a table, leaving the key out is the same.
        if item is not None:
            pairs.append(f"{_format_toml_key(key)} = {format_toml_value(item)}")
    if not pairs:
        return "{}"
    return f"{{ {', '.join(pairs)} }}"


def _format_toml_key(key: str) -> str:
    if _BARE_KEY_PATTERN.fullmatch(key):
        return key
    return format_toml_value(key)


ALWAYS_WRITTEN_KEYS = ("num_layers", "dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim")
TEXT_MODEL_KEYS = ("vocab_size", "tie_embeddings")


def format_model_section(shape: TransformerShape, more: Mapping[str, Any] | None = None) -> str:
    """Lines of TOML that mean `shape` exactly, whatever presets say; `more` are other keys of
    the section, in front."""
    base = find_preset(DEFAULT_PRESETS.get(shape.kind, "small"))
    assert base is not None
    # A key that the default preset sets is written even where it equals the shape's default.
    always = {*ALWAYS_WRITTEN_KEYS, *base.values}
    if not shape.reads_images:
        always.update(TEXT_MODEL_KEYS)
    unread = set()
    if shape.num_expert_layers == shape.num_layers:
        unread.add("ffn_dim")
    if shape.has_latent_attention:
        unread.add("num_kv_heads")
    settings = dict(more or {})
    if shape.kind != "decoder":
        settings["kind"] = shape.kind
    values = shape.to_json()
    for key in SHAPE_KEYS:
        if key not in unread and (key in always or values[key] != STORED_SHAPE_DEFAULTS[key]):
            settings[key] = values[key]
    lines = [f"{key} = {format_toml_value(value)}" for key, value in settings.items()]
    return "\n".join(["[model]", *lines]) + "\n"
