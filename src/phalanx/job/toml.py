"""Plain values, and a model's shape, as TOML. Reading is tomllib's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from phalanx.core.printable import escape_controls
from phalanx.job.model import DEFAULT_PRESETS, SHAPE_KEYS
from phalanx.job.presets import find_preset
from phalanx.job.shape import ModelShape

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_value(value: Any) -> str:
    """A string, number, truth value, list or table of such as one line of TOML; None is the word
    "none"."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return escape_controls(
            json.dumps(value, ensure_ascii=False)
        )  # JSON's escapes are TOML's, but for DEL
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    assert isinstance(value, dict), f"TOML has no {type(value).__name__}"
    pairs = [
        f"{_toml_key(key)} = {toml_value(item)}" for key, item in value.items() if item is not None
    ]
    return f"{{ {', '.join(pairs)} }}" if pairs else "{}"


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else toml_value(key)


ALWAYS = ("num_layers", "dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim")
OF_TEXT = ("vocab_size", "tie_embeddings")


def model_section(shape: ModelShape, more: Mapping[str, Any] | None = None) -> str:
    """Lines of TOML that mean `shape` exactly, whatever presets say; `more` are other keys of
    the section, in front."""
    base = find_preset(DEFAULT_PRESETS.get(shape.kind, "small"))
    assert base is not None
    defaults = ModelShape(0, 0, 0, 0, 0, 0, 0, False).to_json()
    always = {*ALWAYS, *(() if shape.reads_images else OF_TEXT), *base.values}
    unread = {"ffn_dim"} if shape.num_expert_layers == shape.num_layers else set()
    unread |= {"num_kv_heads"} if shape.kv_rank else set()
    values = shape.to_json()
    keys = [key for key in SHAPE_KEYS if key in always or values[key] != defaults[key]]
    chosen = {key: values[key] for key in keys if key not in unread}
    kind = {"kind": shape.kind} if shape.kind != "decoder" else {}
    lines = [
        f"{key} = {toml_value(value)}" for key, value in {**(more or {}), **kind, **chosen}.items()
    ]
    return "\n".join(["[model]", *lines]) + "\n"
