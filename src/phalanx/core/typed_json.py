"""Frozen dataclasses as JSON and back, field by field, by their annotations: values that
processes send each other."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import (
    Any,
    Literal,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

JsonObject: TypeAlias = Mapping[str, object]
"""A parsed JSON object that is handed on unread; `from_json` reads one."""

Value = TypeVar("Value")


class JsonConvertible(Protocol):
    """A value that writes itself as a JSON object."""

    def to_json(self) -> JsonObject: ...


class JsonRecord:
    """Base of frozen dataclasses that write and read themselves as JSON, field by field."""

    def to_json(self) -> JsonObject:
        return _convert_fields_to_json(self)

    @classmethod
    def from_json(cls, document: object) -> Self:
        """The value that `to_json` wrote. Raises TypedJsonError."""
        return cast(Self, _convert_json_to_dataclass(cls, document, cls.__name__))


class TypedJsonError(ValueError):
    """A JSON document is not what a type says; the message names the field."""


def to_json(value: Any) -> Any:
    """`value` as JSON: dataclasses become objects, paths text, tuples lists; a `to_json` method of
    its own comes first.

    Raises TypeError for what JSON has no words for.
    """
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        return _convert_fields_to_json(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [to_json(item) for item in value]
    raise TypeError(f"a {type(value).__name__} has no JSON")


def _convert_fields_to_json(value: Any) -> dict[str, Any]:
    return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}


def from_json(kind: type[Value], document: object) -> Value:
    """The value of dataclass `kind` that `to_json` wrote as `document`.

    Raises TypedJsonError for a field that is unknown, missing without a default, or of another
    type.
    """
    return cast(Value, _convert_json_to_dataclass(kind, document, kind.__name__))


def _convert_json_to_dataclass(kind: type, document: object, where: str) -> object:
    if not isinstance(document, Mapping):
        raise _type_mismatch_error(where, "an object", document)
    hints = _get_field_types(kind)
    unknown = document.keys() - hints.keys()
    if unknown:
        raise TypedJsonError(f"{where} has no field {min(unknown)!r}")
    values = {}
    for name, value in document.items():
        values[name] = _convert_json_to_annotated_type(hints[name], value, f"{where}.{name}")
    missing = _list_fields_without_default(kind) - values.keys()
    if missing:
        raise TypedJsonError(f"{where}.{min(missing)} is missing")
    return kind(**values)


def _convert_json_to_annotated_type(kind: Any, value: object, where: str) -> Any:
    """`value` as the type annotation `kind`; `where` names the field in errors."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _convert_json_to_optional(arguments, value, where)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple:
        return tuple(_convert_json_list(arguments[0], value, where))
    if origin in (Mapping, dict):
        return _convert_json_object(arguments, value, where)
    if hasattr(kind, "from_json"):
        return kind.from_json(value)
    if dataclasses.is_dataclass(kind):
        return _convert_json_to_dataclass(cast(type, kind), value, where)
    if kind is Path and isinstance(value, str):
        return Path(value)
    # A float that was given as 5 is written as an int. By exact type: True is an int, too.
    if kind is float and type(value) in (int, float):
        try:
            return float(cast(float, value))
        except OverflowError:
            raise _type_mismatch_error(where, "a number that a float can be", value) from None
    if kind is object or kind is Any or type(value) is kind:
        return value
    raise _type_mismatch_error(where, getattr(kind, "__name__", str(kind)), value)


def _convert_json_to_optional(kinds: Sequence[Any], value: object, where: str) -> Any:
    """`value` as one of `kinds`: a type and None."""
    if value is None and types.NoneType in kinds:
        return None
    (kind,) = (kind for kind in kinds if kind is not types.NoneType)
    return _convert_json_to_annotated_type(kind, value, where)


def _convert_json_list(kind: Any, value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _type_mismatch_error(where, "a list", value)
    return [
        _convert_json_to_annotated_type(kind, item, f"{where}[{index}]")
        for index, item in enumerate(value)
    ]


def _convert_json_object(arguments: Sequence[Any], value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _type_mismatch_error(where, "an object", value)
    _, kind = arguments
    return {
        key: _convert_json_to_annotated_type(kind, item, f"{where}.{key}")
        for key, item in value.items()
    }


def _type_mismatch_error(where: str, expected: str, value: object) -> TypedJsonError:
    return TypedJsonError(f"{where} must be {expected}, not {str(value)[:80]!r}")


# `get_type_hints` evaluates every annotation as code: once for each class.
@functools.cache
def _get_field_types(kind: type) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@functools.cache
def _list_fields_without_default(kind: type) -> frozenset[str]:
    no_default = dataclasses.MISSING
    names = set()
    for field in dataclasses.fields(kind):
        if field.default is no_default and field.default_factory is no_default:
            names.add(field.name)
    return frozenset(names)
