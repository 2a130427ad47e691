"""ObjectsByAxisType: the objects that the axes of a layout keep on this rank."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


class ObjectsByAxisType:
    """One object of each type, such as the group of tensor parallelism or the view of a pipeline.

    An axis that the layout does not have is not there, so `ParallelContext` has no field for it;
    only results that are read whatever the axis (`cuts`, `copies`) are fields there.
    """

    def __init__(self) -> None:
        self._by_type: dict[type, Any] = {}

    def add(self, axis: object) -> None:
        """Keep `axis`; a second of its type is a bug: the first one would be forgotten."""
        assert type(axis) not in self._by_type, f"a second {type(axis).__name__}"
        self._by_type[type(axis)] = axis

    def find(self, kind: type[T]) -> T | None:
        """The object of this very type; None if the layout has no such axis."""
        return self._by_type.get(kind)
