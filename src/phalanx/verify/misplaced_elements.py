"""Finds elements of a tensor that are where others belong: rows that were gathered or written at
the wrong place.

Numbers of a tensor in training are distinct to many digits, so what an element is, its value says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Of the wrong elements so many are found elsewhere; of few elements it may be by chance.
LEAST_SHARE, MIN_ELEMENTS = 0.99, 8
MAX_ELEMENTS = 16_384  # that are looked up
MAX_SEARCHED = 4_194_304  # of the whole tensor
# Equal elements say nothing of their place. Rows that stand in the place of all others are few.
LEAST_DISTINCT = 0.01
# Of those found, to be told by one distance.
LEAST_OF_ONE_DISTANCE = 0.9


@dataclass(frozen=True)
class RightWeights:
    """A whole tensor, in its own shape, as it should be before and after an update."""

    before: torch.Tensor
    after: torch.Tensor


def describe_misplaced_elements(
    actual: torch.Tensor, places: torch.Tensor, right: RightWeights, *, rounding: float
) -> str:
    """Where the wrong elements `actual` of a tensor come from, to be read after "as if"; "" if not
    from other places of it.

    `places`: their own places in the whole tensor, counted in one dimension; `rounding`: a number
    that is nearer than this share of itself is the same.
    """
    if len(actual) < MIN_ELEMENTS or right.after.numel() > MAX_SEARCHED:
        return ""
    stride = max(1, len(actual) // MAX_ELEMENTS)
    actual, places = actual[::stride], places[::stride]
    found = _find_places(actual, right.after, rounding)
    stale = _find_places(actual, right.before, rounding)
    is_stale = (found < 0) & (stale >= 0)
    found = torch.where(is_stale, stale, found)
    is_elsewhere = (found >= 0) & (found != places)
    if float(is_elsewhere.double().mean()) < LEAST_SHARE:
        return ""
    if len(found.unique()) < max(MIN_ELEMENTS, LEAST_DISTINCT * len(found)):
        return ""
    row = right.after[0].numel() if right.after.dim() > 1 else 1
    distance = _describe_distance((found - places)[is_elsewhere], row)
    when = ""
    if bool(is_stale.any()):
        when = ", as they were before this update"
        when = when if bool(is_stale.all()) else f"{when}, some of them"
    return (
        f"it held elements that belong elsewhere in it{distance}{when}: what is gathered is put in"
        " the wrong place, or rows of other ranks are read from the wrong place"
    )


def _find_places(actual: torch.Tensor, whole: torch.Tensor, rounding: float) -> torch.Tensor:
    """For each element the place in `whole` of the nearest number; -1 where none is near."""
    ordered, order = whole.reshape(-1).double().sort()
    right = torch.searchsorted(ordered, actual).clamp(max=len(ordered) - 1)
    left = (right - 1).clamp(min=0)
    is_left = (ordered[left] - actual).abs() < (ordered[right] - actual).abs()
    nearest = torch.where(is_left, left, right)
    is_near = (ordered[nearest] - actual).abs() <= rounding * actual.abs()
    return torch.where(is_near, order[nearest], -1)


def _describe_distance(distances: torch.Tensor, row: int) -> str:
    """ " (4 rows before)", if most are off by one distance; "" otherwise."""
    commonest = int(distances.mode().values)
    if float((distances == commonest).double().mean()) < LEAST_OF_ONE_DISTANCE:
        return ""
    size, unit = abs(commonest), "element"
    if row > 1 and size % row == 0:
        size, unit = size // row, "row"
    return f" ({size} {unit}{'' if size == 1 else 's'} {'behind' if commonest > 0 else 'before'})"
