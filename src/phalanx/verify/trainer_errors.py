"""The relative errors that a run through the trainer has of each kind, and the differences that
are made of those that are too large. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from phalanx.verify.row import Difference
from phalanx.verify.trainer_facts import Dots, SecondLoopStep


class ErrorRecord:
    """Records the largest relative error of each kind; `tolerance` is how large one may be."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.worst: dict[str, float] = {}

    def note(self, kind: str, error: float) -> None:
        """Note an error, which may be NaN: the worst of all."""
        self.worst[kind] = max(self.worst.get(kind, 0.0), _replace_nan_by_infinity(error))

    def find_wrong_tensors(
        self,
        sums: Sequence[Mapping[str, Dots]],
        reference: SecondLoopStep | None,
        kind: str,
        skipped_names: Sequence[str],
    ) -> dict[str, tuple[float, int]]:
        """Name -> (relative error, the rank that has most of it) of tensors that are off."""
        off: dict[str, tuple[float, int]] = {}
        names = dict.fromkeys(name for of_rank in sums for name in of_rank)
        for name in names:
            if name in skipped_names:
                continue
            # Before the first step nothing has a size: any error counts.
            scale = 1.0
            if reference is not None:
                scale = reference.scale(kind, name)
            errors = [math.sqrt(of_rank[name][0]) if name in of_rank else 0.0 for of_rank in sums]
            # NaN is the worst of all.
            worst = max(range(len(errors)), key=lambda rank: _replace_nan_by_infinity(errors[rank]))
            error = errors[worst] / scale
            self.note(kind.partition("/")[0], error)
            if not error <= self.tolerance:
                off[name] = error, worst
        return off


def make_number_difference(
    kind_of_number: str, step: int, error: float, cause: str, rank: int = 0
) -> Difference:
    """The difference of a number that each rank has, of `rank`'s."""
    return make_tensor_difference(kind_of_number, "", step, error, rank, "", cause)


def make_tensor_difference(
    kind_of_tensor: str,
    name: str,
    step: int,
    error: float,
    rank: int,
    held_blocks: str,
    cause: str,
) -> Difference:
    """The difference of a tensor on `rank`, after `step` steps; `held_blocks`: its part of it."""
    # Steps of differences are counted from 0.
    return Difference(
        kind_of_tensor, name, max(0, step - 1), error, rank, (rank,), held_blocks, cause
    )


def relative_error(actual: float, expected: float) -> float:
    """The difference of two numbers, relative to the expected one."""
    if actual == expected:
        return 0.0
    return abs(actual - expected) / max(abs(expected), 1e-300)


def _replace_nan_by_infinity(value: float) -> float:
    if math.isnan(value):
        return math.inf
    return value
