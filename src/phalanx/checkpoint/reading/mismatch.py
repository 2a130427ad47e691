"""Do the tensors that are there fit those that are wanted?

If not: one readable table of which, and how. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any, Protocol

from phalanx.core.errors import CheckpointError
from phalanx.core.printable import printable

MAX_ROWS = 12
NOTHING = "-"


class Tensor(Protocol):
    """What of a tensor must fit. `dtype` is torch's name of it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor that a model has. Without a `dtype` any will do."""

    shape: tuple[int, ...]
    dtype: str = ""


@dataclass(frozen=True)
class Mismatch:
    """`kind`: "missing" | "extra" | "shape" | "dtype"; `wanted` and `found` in words."""

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
        what: str,
        misfits: tuple[Mismatch, ...],
        *,
        where: str | None = None,
        fix: str | None = None,
    ):
        self.misfits = misfits
        super().__init__(what, where=where, why=_counted(misfits), fix=fix)

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *format_mismatch_table(self.misfits)])

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"tensors": [asdict(misfit) for misfit in self.misfits]}


def find_mismatches(
    wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], *, cast: bool = False
) -> tuple[Mismatch, ...]:
    """What does not fit, missing and extra names first.

    With `cast` another type of numbers does.
    """
    rows = [
        Mismatch(name, "missing", _words(wanted[name]), NOTHING)
        for name in sorted(wanted.keys() - found.keys())
    ]
    rows += [
        Mismatch(name, "extra", NOTHING, _words(found[name]))
        for name in sorted(found.keys() - wanted.keys())
    ]
    for name in sorted(wanted.keys() & found.keys()):
        want, have = wanted[name], found[name]
        if tuple(want.shape) != tuple(have.shape):
            rows.append(Mismatch(name, "shape", _words(want), _words(have)))
        elif (
            want.dtype
            and want.dtype != have.dtype
            and not (cast and _is_real(want.dtype) and _is_real(have.dtype))
        ):
            rows.append(Mismatch(name, "dtype", _words(want), _words(have)))
    return tuple(rows)


def format_mismatch_table(misfits: tuple[Mismatch, ...], limit: int = MAX_ROWS) -> list[str]:
    """Aligned columns, `limit` rows; of each kind the first ones, so that none is hidden behind
    another."""
    shown = _some_of_each(misfits, limit)
    rows = [
        ("tensor", "wanted", "found"),
        *((printable(row.name), row.wanted, row.found) for row in shown),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [
        f"  {name:<{widths[0]}}  {wanted:<{widths[1]}}  {found}" for name, wanted, found in rows
    ]
    return lines + [f"  and {len(misfits) - len(shown)} more"] * (len(misfits) > len(shown))


def _some_of_each(misfits: tuple[Mismatch, ...], limit: int) -> list[Mismatch]:
    by_kind: dict[str, list[Mismatch]] = {}
    for row in misfits:
        by_kind.setdefault(row.kind, []).append(row)
    in_turns = [row for rows in zip_longest(*by_kind.values()) for row in rows if row is not None]
    chosen = in_turns[:limit]
    return [row for row in misfits if row in chosen]


def _counted(misfits: tuple[Mismatch, ...]) -> str:
    words = {
        "missing": "missing",
        "extra": "not in this model",
        "shape": "of another shape",
        "dtype": "of another type",
    }
    counts = {kind: sum(row.kind == kind for row in misfits) for kind in words}
    return ", ".join(f"{count} {words[kind]}" for kind, count in counts.items() if count)


def _words(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}".strip()


def _is_real(dtype: str) -> bool:
    """Floating-point types can be cast into each other; a count or a mask into a weight cannot
    be what was meant."""
    return dtype.startswith(("float", "bfloat"))
