"""Elements that stand where others belong are told by their values."""

from __future__ import annotations

import pytest
import torch

from phalanx.mesh.logical import Box
from phalanx.verify.misplaced_elements import (
    RightWeights,
    describe_misplaced_elements,
    list_places_of_boxes,
)

ROWS, COLUMNS = 24, 16


def draw_weights(dtype: torch.dtype = torch.float64) -> RightWeights:
    generator = torch.Generator().manual_seed(3)
    before = torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    step = 1e-3 * torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    return RightWeights(before.to(dtype), (before + step).to(dtype))


def describe(actual: torch.Tensor, right: RightWeights, rounding: float = 1e-15) -> str:
    wrong = (actual != right.after).reshape(-1)
    places = torch.arange(actual.numel())[wrong]
    found = actual.reshape(-1)[wrong].double()
    return describe_misplaced_elements(found, places, right, rounding=rounding)


@pytest.mark.parametrize(("shift", "told"), [(4, "(4 rows before)"), (-2, "(2 rows behind)")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_of_another_place(shift: int, told: str, dtype: torch.dtype) -> None:
    right = draw_weights(dtype)
    actual = right.after.clone()
    actual[8:16] = right.after[8 - shift : 16 - shift]
    words = describe(actual, right, 8 * torch.finfo(dtype).eps)
    assert f"elements that belong elsewhere in it {told}: " in words


def test_rows_of_another_place_from_before_the_update() -> None:
    right = draw_weights()
    actual = right.after.clone()
    actual[8:16] = right.before[:8]
    assert "(8 rows before), as they were before this update: " in describe(actual, right)


def test_the_first_rows_in_the_place_of_all_others() -> None:
    right = draw_weights()
    actual = right.after.clone()
    actual[8:16], actual[16:] = right.before[:8], right.after[:8]
    assert "it, as they were before this update, some of them: " in describe(actual, right)


def test_one_element_within_a_row() -> None:
    right = draw_weights()
    actual = right.after.clone()
    actual[3:9, 1:] = right.after[3:9, :-1]
    assert "(1 element before)" in describe(actual, right)


def test_where_any_number_is_found_nothing_is_told() -> None:
    """Weights of a norm, in float32: a million of them lie near 1, as near as rounding."""
    generator = torch.Generator().manual_seed(4)
    right = 1 + 0.02 * torch.randn(1_000, 1_000, generator=generator)
    noise = 1e-3 * torch.randn(1_000, 1_000, generator=generator)
    words = describe(right + noise, RightWeights(right, right), 8 * torch.finfo(torch.float32).eps)
    assert words == ""


def test_places_of_columns_and_of_several_boxes() -> None:
    columns = Box((0, 2), (0, 0), (3, 2))
    assert list_places_of_boxes((3, 4), [columns]).tolist() == [2, 3, 6, 7, 10, 11]
    rows = [Box((2, 0), (0, 0), (1, 4)), Box((0, 0), (1, 0), (1, 4))]
    assert list_places_of_boxes((3, 4), rows).tolist() == [8, 9, 10, 11, 0, 1, 2, 3]


def test_other_mistakes_are_not_told_by_place() -> None:
    right = draw_weights()
    assert describe(1.001 * right.after, right) == ""
    # It has stayed as it was: in its own place.
    assert describe(right.before, right) == ""
    zeros = RightWeights(torch.zeros(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS))
    assert describe_misplaced_elements(torch.zeros(50), torch.arange(50), zeros, rounding=0) == ""
    few = right.after.clone()
    few[0, :4] = right.after[1, :4]
    assert describe(few, right) == ""
