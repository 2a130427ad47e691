"""Finds elements of a tensor that are where others belong: rows that were gathered or written at
the wrong place.

Numbers of a tensor in training are distinct to many digits, so what an element is, its value says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phalanx.mesh.logical import Box

# Of the wrong elements so many are found elsewhere; of few elements it may be by chance.
LEAST_SHARE, MIN_ELEMENTS = 0.99, 8
MAX_ELEMENTS = 16_384  # that are looked up
MAX_SEARCHED = 4_194_304  # of the whole tensor
# Equal elements say nothing of their place. Rows that stand in the place of all others are few.
LEAST_DISTINCT = 0.01
# Of those found, to be told by one distance.
LEAST_OF_ONE_DISTANCE = 0.9
# Numbers beside the wrong ones, by so many roundings: where more than a few of these are found, any
# number would be, and what is found says nothing.
CONTROL_ROUNDINGS, MAX_CONTROL_SHARE = 64, 0.05
# As few of before the update are not told.
LEAST_STALE_SHARE = 0.01


@dataclass(frozen=True)
class RightWeights:
    """A whole tensor, in its own shape, as it should be before and after an update."""

    before: torch.Tensor
    after: torch.Tensor


def list_places_of_boxes(shape: Sequence[int], boxes: Sequence[Box]) -> torch.Tensor:
    """Of each element of `boxes`, one box after another, its place in the whole tensor of `shape`,
    counted in one dimension."""
    places = torch.arange(math.prod(shape)).view(*shape)
    return torch.cat([places[box.slices_in_full_tensor].reshape(-1) for box in boxes])


def describe_misplaced_elements(
    actual: torch.Tensor, places: torch.Tensor, right: RightWeights, *, rounding: float
) -> str:
    """Where the wrong elements `actual` of a tensor come from, to be read after "as if"; "" if not
    from other places of it.

    `places`: their own places in the whole tensor, counted in one dimension; `rounding`: a number
    that is nearer than this share of itself is the same.
    """
    if len(actual) < MIN_ELEMENTS:
        return ""
    stride = max(1, len(actual) // MAX_ELEMENTS)
    actual, places = actual[::stride].contiguous(), places[::stride]
    found = _find_places(actual, right.after, rounding)
    stale = _find_places(actual, right.before, rounding)
    is_stale = (found < 0) & (stale >= 0)
    found = torch.where(is_stale, stale, found)
    is_elsewhere = (found >= 0) & (found != places)
    if _compute_share(is_elsewhere) < LEAST_SHARE:
        return ""
    control = _find_places(actual * (1 + CONTROL_ROUNDINGS * rounding), right.after, rounding)
    if _compute_share(control >= 0) > MAX_CONTROL_SHARE:
        return ""
    if len(found.unique()) < max(MIN_ELEMENTS, LEAST_DISTINCT * len(found)):
        return ""
    row = right.after[0].numel() if right.after.dim() > 1 else 1
    distance = _describe_distance((found - places)[is_elsewhere], row)
    when = ""
    if _compute_share(is_stale) > LEAST_STALE_SHARE:
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


def _compute_share(found: torch.Tensor) -> float:
    return float(found.double().mean())


def _describe_distance(distances: torch.Tensor, row: int) -> str:
    """ " (4 rows before)", if most are off by one distance; "" otherwise."""
    commonest = int(distances.mode().values)
    if _compute_share(distances == commonest) < LEAST_OF_ONE_DISTANCE:
        return ""
    size, unit = abs(commonest), "element"
    if row > 1 and size % row == 0:
        size, unit = size // row, "row"
    return f" ({size} {unit}{'' if size == 1 else 's'} {'behind' if commonest > 0 else 'before'})"
