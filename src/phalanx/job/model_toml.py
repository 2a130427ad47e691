"""A shape as the [model] section of a job file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.job.model import DEFAULT_PRESETS, SHAPE_KEYS
from phalanx.job.presets import find_preset
from phalanx.job.shape import ModelShape
from phalanx.job.toml import toml_value

ALWAYS = ("num_layers", "dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim")
OF_TEXT = ("vocab_size", "tie_embeddings")


def model_section(shape: ModelShape, more: Mapping[str, Any] | None = None) -> str:
    """Lines of TOML that mean `shape` exactly, whatever presets say; `more` are other keys of
    the section, in front."""
    base = find_preset(DEFAULT_PRESETS.get(shape.kind, "small"))
    assert base is not None
    defaults = ModelShape(0, 0, 0, 0, 0, 0, 0, False).to_json()
    said = {*ALWAYS, *(() if shape.reads_images else OF_TEXT), *base.values}
    unread = {"ffn_dim"} if shape.num_expert_layers == shape.num_layers else set()
    unread |= {"num_kv_heads"} if shape.kv_rank else set()
    values = shape.to_json()
    wanted = [key for key in SHAPE_KEYS if key in said or values[key] != defaults[key]]
    chosen = {key: values[key] for key in wanted if key not in unread}
    kind = {"kind": shape.kind} if shape.kind != "decoder" else {}
    lines = [
        f"{key} = {toml_value(value)}" for key, value in {**(more or {}), **kind, **chosen}.items()
    ]
    return "\n".join(["[model]", *lines]) + "\n"
