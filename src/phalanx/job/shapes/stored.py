"""From the stored form of a shape to the shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from phalanx.job.shapes.decoder import DecoderShape
from phalanx.job.shapes.stored_keys import REQUIRED_SHAPE_KEYS, STORED_SHAPE_DEFAULTS
from phalanx.job.shapes.vit import VitShape

if TYPE_CHECKING:
    from phalanx.job.shapes.measured import MeasuredModule

# Beyond it sizes overflow where they are computed with.
MAX_FIGURE = 2.0**63
BuiltInShape = DecoderShape | VitShape
AnyShape = TypeVar("AnyShape", DecoderShape, VitShape, "MeasuredModule")


def parse_stored_shape(body: Mapping[str, Any]) -> BuiltInShape | MeasuredModule:
    """The shape that `to_json` of one gave `body`; keys may be missing that have defaults.

    Raises TypeError for keys that no shape has; `require_shape_values` looks at their values.
    """
    counted = body.get("measured")
    if not counted:
        return build_builtin_shape(body)
    _require_shape_keys(body)
    # Here: a plan of a built-in model has no use for it.
    from phalanx.job.shapes.measured import MeasuredModule, load_stored_counts

    return _select_fields(MeasuredModule, {**body, **load_stored_counts(counted)})


def build_builtin_shape(values: Mapping[str, Any]) -> BuiltInShape:
    """The shape of a built-in model from its numbers, as keys of the [model] section have them: of
    a vision transformer where it reads images, else of a decoder."""
    _require_shape_keys(values)
    kind = values.get("kind", "decoder")
    if kind == "vit" or (kind != "decoder" and values.get("image_size", 0) > 0):
        return _select_fields(VitShape, values)
    return _select_fields(DecoderShape, values)


def require_shape_values(shape: BuiltInShape | MeasuredModule) -> None:
    """Raise TypeError for a shape that was stored with a number, text or choice that is none."""
    hints = get_type_hints(type(shape))
    for name in (field.name for field in fields(shape)):
        hint = hints[name]
        value = getattr(shape, name)
        if get_origin(hint) is Literal:
            is_valid = value in get_args(hint)
        elif hint is int:
            is_valid = type(value) is int and 0 <= value < MAX_FIGURE
        elif hint is float:
            is_valid = type(value) in (int, float) and abs(value) < MAX_FIGURE
        else:
            is_valid = hint not in (bool, str) or type(value) is hint
        if not is_valid:
            raise TypeError(f"no shape: {name} is {value!r:.60}")


def _select_fields(shape: type[AnyShape], values: Mapping[str, Any]) -> AnyShape:
    names = {field.name for field in fields(shape)}
    return shape(**{name: value for name, value in values.items() if name in names})


def _require_shape_keys(values: Mapping[str, Any]) -> None:
    unknown = [key for key in values if key not in STORED_SHAPE_DEFAULTS]
    missing = [key for key in REQUIRED_SHAPE_KEYS if key not in values]
    if unknown or missing:
        raise TypeError(f"no shape: unknown {unknown}, missing {missing}")
