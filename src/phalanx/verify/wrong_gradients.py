"""Where a wrong gradient is wrong, and what it is off by beside the gradient of the step before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def examine_wrong_gradients(
    trace: Trace,
    step: int,
    shards: Mapping[str, LogicalShard],
    dots_of: Mapping[str, Sequence[float]],
) -> tuple[dict[str, LeftDots], dict[str, WrongRows]]:
    """LeftDots and WrongRows of the gradients of `step`, counted from 0, that are off on this rank,
    by `dots_of`; of matrices alone, and of those that are one block."""
    left_dots: dict[str, LeftDots] = {}
    rows: dict[str, WrongRows] = {}
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
                    rows[name] = _find_wrong_rows(off, actual, box.global_offset[0])
        if shard.num_local >= MIN_ELEMENTS:
            first, second, third, fourth = sums.tolist()
            left_dots[name] = first, second, third, fourth
    return left_dots, rows


def _find_wrong_rows(off: torch.Tensor, actual: torch.Tensor, first_row: int) -> WrongRows:
    wrong = off.flatten(1).abs().amax(1) > MIN_ERROR * float(actual.abs().max())
    is_zero = actual.flatten(1).abs().amax(1) == 0
    numbers = wrong.nonzero().flatten().tolist() or [0]
    return len(off), int(wrong.sum()), int((wrong & is_zero).sum()), first_row + numbers[0]
