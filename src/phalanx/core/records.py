"""`dataclass`: that of the standard library, made in two thirds of the time.

Python 3.11 and 3.12 compile six functions for each frozen class, and a command imports two hundred
of them. Here equality, hash and text are closures over the fields, with the same results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

GENERATED_HERE = frozenset({"__eq__", "__hash__", "__repr__"})

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, **options):
        """`dataclasses.dataclass`; what is not plainly frozen is left to it."""

        def make(cls):
            if options != {"frozen": True} or GENERATED_HERE & vars(cls).keys():
                return dataclasses.dataclass(**options)(cls)
            return _make_frozen(cls)

        return make if cls is None else make(cls)


def _make_frozen(cls: type) -> Any:
    made: Any = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    fields = dataclasses.fields(made)
    compared = _build_getter([field.name for field in fields if field.compare])
    hashed = _build_getter(
        [field.name for field in fields if (field.compare if field.hash is None else field.hash)]
    )
    shown = [field.name for field in fields if field.repr]

    def equal(self: Any, other: Any) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return compared(self) == compared(other)

    @recursive_repr()
    def show(self: Any) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"{self.__class__.__qualname__}({values})"

    made.__eq__, made.__repr__ = equal, show
    made.__hash__ = lambda self: hash(hashed(self))
    return made


def _build_getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """The values of `names` as a tuple, which `attrgetter` returns for two names or more."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda record: tuple(getattr(record, name) for name in names)
