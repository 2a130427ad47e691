"""From the [model] section to a `ModelShape`: the preset, the user's keys on top, and what
follows from them."""

from __future__ import annotations

from typing import Any

from phalanx.core.errors import LayoutError, did_you_mean
from phalanx.job.hugging_face import is_hugging_face, told_vocab_size
from phalanx.job.presets import Preset, find_preset, preset_names
from phalanx.job.schema import Job, Model
from phalanx.job.shape import ModelShape, default_ffn_dim
from phalanx.job.user_dataset import is_own_dataset

DEFAULT_PRESETS = {"decoder": "small", "vit": "small-vit"}
SHAPE_KEYS = tuple(
    key for key in Model.model_fields if key in ModelShape.__dataclass_fields__ and key != "kind"
)


def preset_of(model: Model) -> Preset:
    """The preset that the section starts from. Raises LayoutError for a name that is none."""
    assert not model.is_foreign, "a user's own module has no preset"
    name = model.preset or DEFAULT_PRESETS.get(model.kind or "decoder", "small")
    preset = find_preset(name)
    if preset is None:
        near = did_you_mean(name, preset_names())
        raise LayoutError(f"unknown preset {name!r}", fix=near or "docs/models.md lists them")
    return preset


def kind_of(model: Model) -> str:
    """The file of phalanx.nn.models that builds it: what the user named, else what the preset is
    of."""
    return model.kind or preset_of(model).kind


def given_keys(model: Model) -> dict[str, Any]:
    """The keys of the shape that the user set, and their values."""
    return {key: getattr(model, key) for key in SHAPE_KEYS if getattr(model, key) is not None}


def fixed_vocab_size(model: Model) -> int | None:
    """The vocabulary that the section or its preset fixes; None where the data decides."""
    if is_hugging_face(model.kind):
        assert model.kind is not None
        return told_vocab_size(model.kind, model.args)
    return (
        model.vocab_size
        if model.is_foreign
        else model.vocab_size or preset_of(model).values.get("vocab_size")
    )


def shape_of(job: Job, vocab_size: int) -> ModelShape:
    """The shape of the job's built-in model.

    `vocab_size`: what the data needs, where the job does not fix it.
    """
    assert not job.model.is_foreign, "a user's own model is measured: see phalanx.job.module_probe"
    return _shape(_resolved(job.model), vocab_size, job.data.seq_len)


def preset_shape(preset: Preset) -> ModelShape:
    """The shape of a preset as it is; 0 for a vocabulary that the data decides."""
    return _shape(_resolved(Model(preset=preset.name)), 0, 0)


def _shape(values: dict[str, Any], vocab_size: int, seq_len: int) -> ModelShape:
    if values.get("positions") != "learned":
        values["max_positions"] = 0
    values.setdefault("max_positions", seq_len)
    values.setdefault("kind", "decoder")
    reads_images = values["kind"] != "decoder" and values.get("image_size")
    values["vocab_size"] = 0 if reads_images else values.get("vocab_size", vocab_size)
    values.setdefault("tie_embeddings", False)
    return ModelShape(**values)


def _resolved(model: Model) -> dict[str, Any]:
    """All that preset and keys say, and the widths that follow."""
    base, given = dict(preset_of(model).values), given_keys(model)
    values = {key: value for key, value in base.items() if key not in _follows(base, given)} | given
    values.setdefault("num_kv_heads", _scaled_kv_heads(base, values))
    values.setdefault("head_dim", max(1, values["dim"] // values["num_heads"]))
    values.setdefault("ffn_dim", _scaled_ffn_dim(base, values))
    if values.get("kv_rank"):
        values.setdefault(
            "value_head_dim", max(1, values["head_dim"] - values.get("rope_head_dim", 0))
        )
    if "expert_ffn_dim" in base:
        values.setdefault("expert_ffn_dim", _in_proportion("expert_ffn_dim", base, values))
    return values | {"kind": kind_of(model)}


def _follows(base: dict[str, Any], given: dict[str, Any]) -> set[str]:
    """Keys of the preset that hang on a key that was given: they are told anew, unless they were
    given, too."""
    follows = set()
    if "num_heads" in given:
        follows.add("num_kv_heads")
    if {"dim", "num_heads"} & set(given) and base.get("head_dim", 0) * base["num_heads"] == base[
        "dim"
    ]:
        follows.add("head_dim")
    if "dim" in given:
        follows |= {"ffn_dim", "expert_ffn_dim"}
    if _is_gated(base | given) != _is_gated(base):
        follows.add("ffn_dim")
    return {key for key in follows if key in base}


def _scaled_kv_heads(base: dict[str, Any], values: dict[str, Any]) -> int:
    """As many query heads to one as in the preset, where that comes out even; else one to one."""
    heads: int = values["num_heads"]
    groups: int = base["num_heads"] // base.get("num_kv_heads", base["num_heads"])
    return heads // groups if heads % groups == 0 else heads


def _scaled_ffn_dim(base: dict[str, Any], values: dict[str, Any]) -> int:
    """In the preset's proportion to dim; the usual one if nothing is there, or a gate came or
    went."""
    if "ffn_dim" in base and _is_gated(base) == _is_gated(values):
        return _in_proportion("ffn_dim", base, values)
    dim: int = values["dim"]
    return default_ffn_dim(dim) if _is_gated(values) else 4 * dim


def _in_proportion(key: str, base: dict[str, Any], values: dict[str, Any]) -> int:
    """The preset's width in its proportion to dim, rounded up."""
    return -int(-base[key] * values["dim"] // base["dim"])


def _is_gated(values: dict[str, Any]) -> bool:
    return not str(values.get("activation", "swiglu")).startswith("gelu")


def what_follows(model: Model) -> list[str]:
    """One line for each width of a preset that changed because the user gave another one."""
    if model.is_foreign or model.preset is None:
        return []
    given = given_keys(model)
    was, now = _resolved(Model(preset=model.preset)), _resolved(model)
    lines = []
    for key, causes in _CAUSES.items():
        if key in given or key not in was or now[key] == was[key] or _is_one_to_one(key, was, now):
            continue
        why = " and ".join(f"model.{cause}" for cause in causes if cause in given)
        lines.append(f"{key} {now[key]} follows from {why} ({model.preset} has {was[key]})")
    return lines


_CAUSES = {
    "num_kv_heads": ("num_heads",),
    "head_dim": ("dim", "num_heads"),
    "ffn_dim": ("dim", "activation"),
    "expert_ffn_dim": ("dim",),
}


def _is_one_to_one(key: str, *resolved: dict[str, Any]) -> bool:
    """True for key-value heads that were and are as many as query heads: nobody wonders about
    these."""
    return key == "num_kv_heads" and all(values[key] == values["num_heads"] for values in resolved)


def refuse_other_data(job: Job, measured: ModelShape | None = None) -> None:
    """Raises LayoutError for a model that cannot read the job's data.

    A plan alone may be made without data.
    """
    shape = measured if job.model.is_foreign else shape_of(job, vocab_size=1)
    if shape is None or not shape.reads_images:
        return
    if job.data.mixture or not is_own_dataset(job.data.source):
        raise LayoutError(
            f"the model reads images, and data.source {job.data.source!r} holds tokens",
            fix='give your own dataset: data.source = "package.module:factory"',
        )
