"""Where a wrong gradient is wrong, and what it is off by beside the gradient of the step before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from phalanx.mesh.logical import LogicalShard
from phalanx.verify.trace import TraceTensorReader
from phalanx.verify.trace_facts import Trace, name_gradients_set

# Relative to the gradient: what is less may be rounding.
MIN_ERROR = 1e-4
# A tensor of a few elements may be a multiple of any other by chance.
MIN_ELEMENTS = 8

LeftDots = tuple[float, float, float, float]
"""Over the elements a rank holds: |e|^2, e.p, |p|^2, |a - p|^2, with `e` what its gradient `a` is
off by and `p` the reference's gradient of the step before; zeros in the first step."""
WrongRows = tuple[int, int, int, int]
"""Of the rows of a matrix that a rank holds: how many there are, how many are off, how many of
these are zero, and the number of the first of them in the whole tensor."""

RowFactor = tuple[int, int, float]
"""Of the rows of a matrix that a rank holds: how many are the same multiple of the reference, how
many there are, and the factor."""
# So many rows are no multiple by chance, and neither are rows of so many columns.
MIN_ROWS_ALIKE, MIN_COLUMNS = 4, 8
ROW_TOLERANCE = 1e-6


@dataclass
class WrongGradients:
    """What wrong gradients of a step are: name -> each of these, where there is one."""

    left: dict[str, LeftDots] = field(default_factory=dict)
    rows: dict[str, WrongRows] = field(default_factory=dict)
    row_factors: dict[str, RowFactor] = field(default_factory=dict)


def examine_wrong_gradients(
    trace: Trace,
    step: int,
    shards: Mapping[str, LogicalShard],
    dots_of: Mapping[str, Sequence[float]],
) -> WrongGradients:
    """What the gradients of `step`, counted from 0, are that are off on this rank, by `dots_of`;
    rows of matrices alone, and of those that are one block."""
    wrong = WrongGradients()
    for name, dots in dots_of.items():
        # Infinite where it is no part of the tensor.
        if not MIN_ERROR**2 * dots[3] < dots[0] < float("inf"):
            continue
        sums = torch.zeros(4, dtype=torch.float64)
        shard = shards[name]
        with (
            TraceTensorReader(trace, name_gradients_set(step)) as now,
            TraceTensorReader(trace, name_gradients_set(max(0, step - 1))) as earlier,
        ):
            for box in shard.boxes:
                actual = shard.tensor[box.slices_in_local_tensor].double().cpu()
                off = actual - now.block(name, box.global_offset, box.size).double()
                if step:
                    before = earlier.block(name, box.global_offset, box.size).double()
                    stale = actual - before
                    pairs = (off, off), (off, before), (before, before), (stale, stale)
                    sums += torch.stack([(a * b).sum() for a, b in pairs])
                if len(shard.boxes) == 1 and off.ndim > 1:
                    wrong.rows[name] = _find_wrong_rows(off, actual, box.global_offset[0])
                    factor = find_factor_of_rows(off, actual)
                    if factor is not None:
                        wrong.row_factors[name] = factor
        if shard.num_local >= MIN_ELEMENTS:
            first, second, third, fourth = sums.tolist()
            wrong.left[name] = first, second, third, fourth
    return wrong


def _find_wrong_rows(off: torch.Tensor, actual: torch.Tensor, first_row: int) -> WrongRows:
    wrong = off.flatten(1).abs().amax(1) > MIN_ERROR * float(actual.abs().max())
    is_zero = actual.flatten(1).abs().amax(1) == 0
    numbers = wrong.nonzero().flatten().tolist() or [0]
    return len(off), int(wrong.sum()), int((wrong & is_zero).sum()), first_row + numbers[0]


def find_factor_of_rows(off: torch.Tensor, actual: torch.Tensor) -> RowFactor | None:
    """The factor that several wrong rows have in common, and not all of them; None for no such."""
    actual = actual.flatten(1)
    reference = actual - off.flatten(1)
    sizes = reference.square().sum(1)
    if actual.shape[1] < MIN_COLUMNS:
        return None
    factors = (actual * reference).sum(1) / sizes
    rest = (actual - factors[:, None] * reference).norm(dim=1)
    is_multiple = (sizes > 0) & (rest <= ROW_TOLERANCE * actual.norm(dim=1))
    wrong = factors[is_multiple & ((factors - 1).abs() > MIN_ERROR)]
    if len(wrong) < MIN_ROWS_ALIKE:
        return None
    factor = wrong.median()
    num_alike = int(((wrong - factor).abs() <= ROW_TOLERANCE * factor.abs()).sum())
    if not MIN_ROWS_ALIKE <= num_alike < len(actual):
        return None
    return num_alike, len(actual), factor.item()
