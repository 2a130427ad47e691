"""From the [model] section to the shape of a model: the preset, the user's keys on top, and what
follows from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.core.batch import BYTE_VOCAB_SIZE
from phalanx.core.errors import LayoutError, format_nearest_word_hint
from phalanx.job.hugging_face import find_vocab_size, is_hugging_face
from phalanx.job.presets import Preset, find_preset, list_preset_names
from phalanx.job.schema import Job, Model
from phalanx.job.shapes.decoder import default_ffn_dim
from phalanx.job.shapes.stored import BuiltInShape, build_builtin_shape
from phalanx.job.shapes.stored_keys import STORED_SHAPE_DEFAULTS
from phalanx.job.user_dataset import is_own_dataset

if TYPE_CHECKING:
    from phalanx.job.costs import ModelCosts
    from phalanx.job.module_probe import SampleForm, TellProgress
    from phalanx.job.shapes.measured import MeasuredModule

DEFAULT_PRESETS = {"decoder": "small", "vit": "small-vit"}
SHAPE_KEYS = tuple(
    key for key in Model.model_fields if key in STORED_SHAPE_DEFAULTS and key != "kind"
)


def find_preset_of_model(model: Model) -> Preset:
    """The preset that the section starts from. Raises LayoutError for a name that is none."""
    assert not model.is_foreign, "a user's own module has no preset"
    name = model.preset or DEFAULT_PRESETS.get(model.kind or "decoder", "small")
    preset = find_preset(name)
    if preset is None:
        suggestion = format_nearest_word_hint(name, list_preset_names())
        raise LayoutError(f"unknown preset {name!r}", fix=suggestion or "docs/models.md lists them")
    return preset


def find_model_kind(model: Model) -> str:
    """The file of phalanx.nn.models that builds the model: the one that the user named, else
    that of the preset."""
    return model.kind or find_preset_of_model(model).kind


def list_user_set_keys(model: Model) -> dict[str, Any]:
    """The keys of the shape that the user set, and their values."""
    return {key: getattr(model, key) for key in SHAPE_KEYS if getattr(model, key) is not None}


def find_vocab_size_of(model: Model) -> int | None:
    """The vocabulary that the section or its preset fixes; None where the data decides."""
    if is_hugging_face(model.kind):
        assert model.kind is not None
        return find_vocab_size(model.kind, model.args)
    if model.is_foreign:
        return model.vocab_size
    return model.vocab_size or find_preset_of_model(model).values.get("vocab_size")


def measure_or_build_model_shape(
    job: Job,
    vocab_size: int | None,
    *,
    sample_form: SampleForm | None = None,
    tell: TellProgress | None = None,
) -> ModelCosts:
    """The shape of the job's model: measured in another process where it is a user's own module.

    `vocab_size`: what the data needs; before the data is read text is taken for bytes, as it is
    without a tokenizer. `sample_form`, `tell`: as `measure_foreign_shape` takes them.
    """
    if job.model.is_foreign:
        # Here: a plan of a built-in model has no use for it.
        from phalanx.job.module_probe import measure_foreign_shape

        measured = measure_foreign_shape(job, sample_form=sample_form, tell=tell)
        assert measured is not None, "the model is foreign"
        return measured
    return build_model_shape(job, vocab_size or BYTE_VOCAB_SIZE)


def build_model_shape(job: Job, vocab_size: int) -> BuiltInShape:
    """The shape of the job's built-in model.

    `vocab_size`: what the data needs, where the job does not fix it.
    """
    assert not job.model.is_foreign, "a user's own model is measured: see phalanx.job.module_probe"
    return _build_shape_of_kind(_resolve_shape_keys(job.model), vocab_size, job.data.seq_len)


def build_preset_shape(preset: Preset) -> BuiltInShape:
    """The shape of a preset as it is; 0 for a vocabulary that the data decides."""
    return _build_shape_of_kind(_resolve_shape_keys(Model(preset=preset.name)), 0, 0)


def _build_shape_of_kind(values: dict[str, Any], vocab_size: int, seq_len: int) -> BuiltInShape:
    # 0 in any other case, whatever a preset says: a table that is not there has no rows.
    if values.get("positions") != "learned":
        values["max_positions"] = 0
    # Learned positions without a number: as many as the job's sequences need.
    values.setdefault("max_positions", seq_len)
    values.setdefault("kind", "decoder")
    reads_images = values["kind"] != "decoder" and values.get("image_size")
    values["vocab_size"] = 0 if reads_images else values.get("vocab_size", vocab_size)
    values.setdefault("tie_embeddings", False)
    return build_builtin_shape(values)


def _resolve_shape_keys(model: Model) -> dict[str, Any]:
    """All that preset and keys say, and the widths that follow."""
    base, user_values = dict(find_preset_of_model(model).values), list_user_set_keys(model)
    values = {
        key: value
        for key, value in base.items()
        if key not in _find_dependent_keys(base, user_values)
    } | user_values
    # setdefault after the user's keys: what they gave is never scaled.
    values.setdefault("num_kv_heads", _scale_kv_heads(base, values))
    values.setdefault("head_dim", max(1, values["dim"] // values["num_heads"]))
    values.setdefault("ffn_dim", _scale_ffn_dim(base, values))
    if values.get("kv_rank"):
        values.setdefault(
            "value_head_dim", max(1, values["head_dim"] - values.get("rope_head_dim", 0))
        )
    if "expert_ffn_dim" in base:
        values.setdefault("expert_ffn_dim", _scale_width("expert_ffn_dim", base, values))
    return values | {"kind": find_model_kind(model)}


def _find_dependent_keys(base: dict[str, Any], user_values: dict[str, Any]) -> set[str]:
    """Keys of the preset that depend on a key of the user's: they are computed anew, unless the
    user gave them, too."""
    follows = set()
    if "num_heads" in user_values:
        follows.add("num_kv_heads")
    if {"dim", "num_heads"} & set(user_values) and base.get("head_dim", 0) * base[
        "num_heads"
    ] == base["dim"]:
        # Only where the preset's own heads fill dim: others have a width of their own.
        follows.add("head_dim")
    if "dim" in user_values:
        follows |= {"ffn_dim", "expert_ffn_dim"}
    # A gate is a third matrix: of the same size, three are narrower than two.
    if _has_gated_activation(base | user_values) != _has_gated_activation(base):
        follows.add("ffn_dim")
    return {key for key in follows if key in base}


def _scale_kv_heads(base: dict[str, Any], values: dict[str, Any]) -> int:
    """The number of key-value heads that keeps the preset's number of query heads to one, if
    that comes out even; else that of the query heads."""
    heads: int = values["num_heads"]
    groups: int = base["num_heads"] // base.get("num_kv_heads", base["num_heads"])
    # Where groups come out uneven, plain multi-head attention is always legal.
    if heads % groups == 0:
        return heads // groups
    return heads


def _scale_ffn_dim(base: dict[str, Any], values: dict[str, Any]) -> int:
    """The width in the preset's proportion to dim; the usual one if the preset has none, or a
    gate came or went."""
    if "ffn_dim" in base and _has_gated_activation(base) == _has_gated_activation(values):
        return _scale_width("ffn_dim", base, values)
    dim: int = values["dim"]
    if _has_gated_activation(values):
        return default_ffn_dim(dim)
    return 4 * dim


def _scale_width(key: str, base: dict[str, Any], values: dict[str, Any]) -> int:
    """The preset's width in its proportion to dim, rounded up."""
    # -(-a // b): the ceiling, in whole numbers.
    return -int(-base[key] * values["dim"] // base["dim"])


def _has_gated_activation(values: dict[str, Any]) -> bool:
    return not str(values.get("activation", "swiglu")).startswith("gelu")


def explain_scaled_widths(model: Model) -> list[str]:
    """One line for each width of a preset that changed because the user gave another one."""
    if model.is_foreign or model.preset is None:
        return []
    user_values = list_user_set_keys(model)
    was, now = _resolve_shape_keys(Model(preset=model.preset)), _resolve_shape_keys(model)
    lines = []
    for key, causes in _CAUSES_OF_SCALED_KEY.items():
        if (
            key in user_values
            or key not in was
            or now[key] == was[key]
            or _is_multi_head_attention(key, was, now)
        ):
            continue
        why = " and ".join(f"model.{cause}" for cause in causes if cause in user_values)
        lines.append(f"{key} {now[key]} follows from {why} ({model.preset} has {was[key]})")
    return lines


_CAUSES_OF_SCALED_KEY = {
    "num_kv_heads": ("num_heads",),
    "head_dim": ("dim", "num_heads"),
    "ffn_dim": ("dim", "activation"),
    "expert_ffn_dim": ("dim",),
}


def _is_multi_head_attention(key: str, *resolved: dict[str, Any]) -> bool:
    """True for key-value heads that were and are as many as query heads: nobody wonders about
    these."""
    return key == "num_kv_heads" and all(values[key] == values["num_heads"] for values in resolved)


def require_model_reads_data(job: Job, measured: MeasuredModule | None = None) -> None:
    """Raises LayoutError for a model that cannot read the job's data.

    A plan alone may be made without data.
    """
    shape: BuiltInShape | MeasuredModule | None = measured
    if not job.model.is_foreign:
        shape = build_model_shape(job, vocab_size=1)
    if shape is None or not shape.reads_images:
        return
    if job.data.mixture or not is_own_dataset(job.data.source):
        raise LayoutError(
            f"the model reads images, and data.source {job.data.source!r} holds tokens",
            fix='give your own dataset: data.source = "package.module:factory"',
        )
