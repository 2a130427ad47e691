"""Compares the tensors of a checkpoint with those that a model expects, and formats the mismatches
as a table. Torch-free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any, Protocol

from phalanx.core.errors import CheckpointError
from phalanx.core.printable import printable

MAX_SHOWN_MISMATCHES = 12
ABSENT_TENSOR_TEXT = "-"


class HasShapeAndDtype(Protocol):
    """The part of a tensor that must match. `dtype` is torch's name of it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class ExpectedShapeAndDtype:
    """A tensor that a model has. Without a `dtype` any type matches."""

    shape: tuple[int, ...]
    dtype: str = ""


@dataclass(frozen=True)
class TensorMismatch:
    """A tensor that does not match: "missing", "extra", of another "shape" or "dtype".

    `wanted` and `found` are in words. The fields' names are those of the `--json` schema.
    """

    name: str
    kind: str
    wanted: str
    found: str


class MismatchError(CheckpointError):
    """Tensors that do not fit a model.

    `str()` is a line and a table: here one line would say too little.
    """

    def __init__(
        self,
        message: str,
        mismatches: tuple[TensorMismatch, ...],
        *,
        where: str | None = None,
        fix: str | None = None,
    ):
        self.mismatches = mismatches
        super().__init__(
            message, where=where, why=_describe_hidden_mismatch_counts(mismatches), fix=fix
        )

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *format_mismatch_table(self.mismatches)])

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"tensors": [asdict(mismatch) for mismatch in self.mismatches]}


def find_tensor_mismatches(
    expected: Mapping[str, HasShapeAndDtype],
    stored: Mapping[str, HasShapeAndDtype],
    *,
    cast: bool = False,
) -> tuple[TensorMismatch, ...]:
    """The mismatches of two sets of tensors by name, missing and extra names first.

    With `cast` floating-point tensors of another type match.
    """
    rows = []
    for name in sorted(expected.keys() - stored.keys()):
        rows.append(
            TensorMismatch(
                name, "missing", _describe_shape_and_dtype(expected[name]), ABSENT_TENSOR_TEXT
            )
        )
    for name in sorted(stored.keys() - expected.keys()):
        rows.append(
            TensorMismatch(
                name, "extra", ABSENT_TENSOR_TEXT, _describe_shape_and_dtype(stored[name])
            )
        )
    for name in sorted(expected.keys() & stored.keys()):
        model_tensor, stored_tensor = expected[name], stored[name]
        if tuple(model_tensor.shape) != tuple(stored_tensor.shape):
            kind = "shape"
        elif not _does_dtype_match_or_cast(model_tensor.dtype, stored_tensor.dtype, cast):
            kind = "dtype"
        else:
            continue
        rows.append(
            TensorMismatch(
                name,
                kind,
                _describe_shape_and_dtype(model_tensor),
                _describe_shape_and_dtype(stored_tensor),
            )
        )
    return tuple(rows)


def _does_dtype_match_or_cast(expected: str, stored: str, cast: bool) -> bool:
    if not expected or expected == stored:
        return True
    return cast and _is_floating_point(expected) and _is_floating_point(stored)


def format_mismatch_table(
    mismatches: tuple[TensorMismatch, ...], limit: int = MAX_SHOWN_MISMATCHES
) -> list[str]:
    """Lines of aligned columns, `limit` rows at most: the first ones of each kind, so that none is
    hidden behind another."""
    shown = _select_shown_mismatches(mismatches, limit)
    rows = [("tensor", "wanted", "found")]
    for row in shown:
        rows.append((printable(row.name), row.wanted, row.found))
    name_width = max(len(name) for name, _, _ in rows)
    expected_width = max(len(expected) for _, expected, _ in rows)
    lines = []
    for name, expected, stored in rows:
        lines.append(f"  {name:<{name_width}}  {expected:<{expected_width}}  {stored}")
    if len(mismatches) > len(shown):
        lines.append(f"  and {len(mismatches) - len(shown)} more")
    return lines


def _select_shown_mismatches(
    mismatches: tuple[TensorMismatch, ...], limit: int
) -> list[TensorMismatch]:
    by_kind: dict[str, list[TensorMismatch]] = {}
    for row in mismatches:
        by_kind.setdefault(row.kind, []).append(row)
    chosen: list[TensorMismatch] = []
    # The first of each kind, then the second, ...
    for rows in zip_longest(*by_kind.values()):
        chosen += filter(None, rows)
    del chosen[limit:]
    return [row for row in mismatches if row in chosen]


def _describe_hidden_mismatch_counts(mismatches: tuple[TensorMismatch, ...]) -> str:
    words = {
        "missing": "missing",
        "extra": "not in this model",
        "shape": "of another shape",
        "dtype": "of another type",
    }
    counts = Counter(row.kind for row in mismatches)
    return ", ".join(f"{counts[kind]} {words[kind]}" for kind in words if counts[kind])


def _describe_shape_and_dtype(tensor: HasShapeAndDtype) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}".strip()


def _is_floating_point(dtype: str) -> bool:
    """True for floating-point types, which can be cast into each other; a count or a mask cast into
    a weight would be a mistake."""
    return dtype.startswith(("float", "bfloat"))
