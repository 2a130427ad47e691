"""`phalanx.core.records.dataclass` against the standard library's, its reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from phalanx.core import records


def build_classes(decorate: Callable[[type], type]) -> dict[str, Any]:
    """Classes of every kind of field, made by `decorate`."""

    class Empty:
        pass

    class One:
        value: float

    class Several:
        name: str
        size: int = 1
        note: str = dataclasses.field(default="", compare=False)
        unhashable: list[int] = dataclasses.field(default_factory=list, hash=False)
        hidden: int = dataclasses.field(default=0, repr=False)

    class OwnText:
        name: str = "x"

        def __repr__(self) -> str:
            return "own"

    made = {each.__name__: decorate(each) for each in (Empty, One, Several, OwnText)}

    class Child(made["Several"]):  # type: ignore[misc]
        more: int = 2

    return made | {"Child": decorate(Child)}


OURS = build_classes(records.dataclass(frozen=True))
REFERENCE = build_classes(dataclasses.dataclass(frozen=True))
ARGUMENTS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("Empty", ()),
    ("One", (math.nan,)),
    ("One", (1.0,)),
    ("One", (2.0,)),
    ("Several", ("a",)),
    ("Several", ("a", 1, "another note")),
    ("Several", ("a", 1, "", [3])),
    ("Several", ("a", 1, "", [], 4)),
    ("OwnText", ()),
    ("Child", ("a",)),
    ("Child", ("a", 1, "", [], 0, 3)),
)


def test_equality_hash_and_text_are_those_of_the_standard_library() -> None:
    ours = [OURS[name](*values) for name, values in ARGUMENTS]
    reference = [REFERENCE[name](*values) for name, values in ARGUMENTS]
    assert list(map(repr, ours)) == list(map(repr, reference))
    assert list(map(hash, ours)) == list(map(hash, reference))
    again = [OURS[name](*values) for name, values in ARGUMENTS]
    for row, mine in enumerate(ours):
        for column, other in enumerate(again):
            expected = reference[row] == REFERENCE[ARGUMENTS[column][0]](*ARGUMENTS[column][1])
            assert (mine == other) is expected


def test_classes_are_dataclasses_and_frozen() -> None:
    record = OURS["Several"]("a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.size = 2
    assert dataclasses.replace(record, size=5) == OURS["Several"]("a", 5)
    assert dataclasses.asdict(record) == dataclasses.asdict(REFERENCE["Several"]("a"))
    assert OURS["Several"].__match_args__ == REFERENCE["Several"].__match_args__
    assert (record == "a") is False


def test_a_record_inside_itself_has_a_text() -> None:
    holder = OURS["Several"]("a")
    holder.unhashable.append(holder)
    assert "..." in repr(holder)


def test_what_is_not_plainly_frozen_is_left_to_the_standard_library() -> None:
    @records.dataclass
    class Open:
        size: int = 1

    @records.dataclass(frozen=True, order=True)
    class Ordered:
        size: int = 1

    assert Open.__hash__ is None
    assert Ordered(1) < Ordered(2)
