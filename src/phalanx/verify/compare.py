"""Measures how far the observations of a layout's ranks are from the trace of one process.

Torch-free.

The error of a tensor is |a - r| / max(|r|, 1e-3 |g| / sqrt(num_tensors)), over all its blocks on
all ranks; replicas count each time, so that the error is never too small.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.verify.trace_facts import Trace, name_weights_set

ZERO_DOTS = (0.0,) * 5
# The least square of the cosine between an error and the reference that makes one a multiple.
MIN_COSINE_SQUARED_OF_MULTIPLE = 1 - 1e-5
MIN_EXPLAINED_TOLERANCE_SHARE = 0.1  # of the tolerance

Block = tuple[tuple[int, ...], tuple[int, ...]]
Box = tuple[tuple[int, ...], tuple[int, ...], int]
"""(offset, size) in the whole tensor, and how many ranks hold this one while they differ in
others."""


@dataclass(frozen=True)
class TraceComparison:
    """The trace of one process, and the observations of every rank of a layout
    (`RankObservations`, as JSON)."""

    trace: Trace
    observations: Sequence[Mapping[str, Any]]
    tolerance: float
    """Of the row: errors below it are none."""
    _even: dict[str, bool] = field(default_factory=dict)

    @functools.cached_property
    def stages(self) -> dict[str, tuple[int, ...]]:
        """Name -> the pipeline stages that hold the parameter."""
        stages_of: dict[str, tuple[int, ...]] = {}
        for observation in self.observations:
            for name, stages in observation.get("stages", {}).items():
                stages_of[name] = tuple(stages)
        return stages_of

    def find_ranks_holding_parameter(self, name: str) -> list[int]:
        """The ranks that have a part of the parameter."""
        ranks = []
        for rank, observation in enumerate(self.observations):
            if observation["held"].get(name, "nothing") != "nothing":
                ranks.append(rank)
        return ranks

    def list_squared_errors_by_rank(self, kind: str, name: str) -> list[float]:
        """By rank the square of its part's error; 0 where it has no part."""
        return [
            self.squared_tensor_error(kind, name, rank) for rank in range(len(self.observations))
        ]

    def relative_scalar_error(self, value: float, attribute: str, step: int) -> float:
        reference = getattr(self.trace.steps[step], attribute)
        # 1e-30: a reference of exactly zero must not divide.
        error = abs(value - reference) / max(abs(reference), 1e-30)
        return replace_nan_by_infinity(error)

    def largest_relative_scalar_error(self, key: str, attribute: str) -> float:
        errors = []
        for observation in self.observations:
            for step, value in enumerate(observation[key]):
                errors.append(self.relative_scalar_error(value, attribute, step))
        return max(errors)

    def relative_evaluation_errors(self) -> list[float]:
        reference = self.trace.evaluation
        if reference is None:
            return [0.0]
        errors = []
        for observation in self.observations:
            error = abs(observation["evaluation"] - reference) / max(abs(reference), 1e-30)
            errors.append(replace_nan_by_infinity(error))
        return errors

    def error(self, kind: str, name: str) -> float:
        square = sum(self.list_squared_errors_by_rank(kind, name))
        scale = self.trace.scale(kind, name)
        if not square:
            return max(0.0, self.tensor_coverage_gap(kind, name))
        # NaN is no number; a scale of 0: all tensors of the set are zero in one process.
        if square != square or not scale:
            return math.inf
        return max(square**0.5 / scale, self.tensor_coverage_gap(kind, name))

    def tensor_coverage_gap(self, kind: str, name: str) -> float:
        """0 if the blocks of all ranks make the tensor a whole number of times, else how far
        they are from it."""
        if not self._blocks_cover_tensor_evenly(name):
            return 1.0
        size = self.trace.sizes[kind][name] ** 2
        if size == 0:
            return 0.0
        # All blocks hold the tensor `copies` times: a border that is off makes it no integer.
        copies = self._sum_reference_squares_over_ranks(kind, name) / size
        # At least one: a tensor that no rank holds is not zero times there, but missing.
        gap = abs(copies - max(1, round(copies)))
        if not gap > 1e-6:
            return 0.0
        return gap

    def _sum_reference_squares_over_ranks(self, kind: str, name: str) -> float:
        """The square of the reference over the blocks of all ranks."""
        total = 0.0
        for observation in self.observations:
            total += observation["tensors"][kind].get(name, ZERO_DOTS)[-1]
        return total

    def count_tensor_copies(self, kind: str, name: str) -> int:
        """Count how many times the ranks hold the tensor; at least 1."""
        size = self.trace.sizes[kind].get(name, 0.0) ** 2
        if not size:
            return 1
        return max(1, round(self._sum_reference_squares_over_ranks(kind, name) / size))

    def cosine_of_error_and_reference(self, kind: str, name: str) -> float:
        """The cosine between the error of a tensor and the reference: near 0 for rounding."""
        error, along, size = 0.0, 0.0, 0.0
        for observation in self.observations:
            dots = observation["tensors"][kind].get(name, ZERO_DOTS)
            error, along, size = error + dots[0], along + dots[2] - dots[3], size + dots[3]
        if not error or not size:
            return 0.0
        return along / (error * size) ** 0.5

    def has_weight_moved(self, kind: str, name: str, rank: int) -> bool:
        """True if the weight has moved on a rank, in a set of weights."""
        return self.observations[rank]["tensors"][kind].get(name, ZERO_DOTS)[1] > 0

    def has_wrong_local_shape(self, kind: str, name: str, rank: int) -> bool:
        """True if a rank's part does not have the shape that its place in the tensor has."""
        return self.observations[rank]["tensors"][kind].get(name, ZERO_DOTS)[1] < 0

    def has_weight_partly_moved(self, kind: str, name: str, rank: int) -> bool:
        """True if some elements of a weight have moved as they should and the others not at all."""
        _, moved, along, *_ = self.observations[rank]["tensors"][kind].get(name, ZERO_DOTS)
        # Each element a of the movement is 0 or the reference's r: a (a - r) = 0.
        return moved > 0 and abs(moved - along) <= 1e-9 * moved

    def has_shared_blocks(self, name: str) -> bool:
        """True if several ranks hold a block of the tensor alike, while they differ in others: keys
        and values of fewer heads than ranks."""
        for observation in self.observations:
            if any(
                num_replicas > 1 for _, _, num_replicas in _parse_observed_boxes(observation, name)
            ):
                return True
        return False

    def _blocks_cover_tensor_evenly(self, name: str) -> bool:
        is_even = self._even.get(name)
        if is_even is None:
            is_even = blocks_cover_evenly(
                [_parse_observed_boxes(of_rank, name) for of_rank in self.observations]
            )
            self._even[name] = is_even
        return is_even

    def worst(self, kind: str) -> float:
        return max(
            (self.error(kind, name) for name in self.list_tensors_in_forward_order(kind)),
            default=0.0,
        )

    def list_tensors_in_forward_order(self, kind: str) -> list[str]:
        """The tensors of a set, in forward order."""
        sizes = self.trace.sizes[kind]
        return [name for name in self.trace.order if name in sizes] or list(sizes)

    def largest_relative_weight_error(self) -> float:
        """The largest error of a weight after the last step, relative to the weight itself."""
        kind = name_weights_set(self.trace.num_steps - 1)
        errors = [0.0]
        for name, norm in self.trace.norms.get(kind, {}).items():
            square = sum(self.list_squared_errors_by_rank(kind, name))
            if square:
                errors.append(replace_nan_by_infinity(square**0.5 / norm) if norm else math.inf)
        return max(errors)

    def find_unequal_replicas(self, kind: str) -> tuple[str, tuple[int, ...]] | None:
        """(name, ranks) of the first tensor of a set of which ranks that hold the same block do not
        hold the same bits; the ranks are those that are not with the most."""
        for name in self.list_tensors_in_forward_order(kind):
            digests_of = self._list_block_digests_by_rank(kind, name)
            ranks: set[int] = set()
            for digests in digests_of.values():
                # What most ranks hold is taken for right, and the others are named.
                usual, _ = Counter(digests.values()).most_common(1)[0]
                ranks |= {rank for rank, digest in digests.items() if digest != usual}
            if ranks:
                return name, tuple(sorted(ranks))
        return None

    def _list_block_digests_by_rank(self, kind: str, name: str) -> dict[Block, dict[int, str]]:
        """The digest of each block of a tensor on each rank that holds it."""
        digests_of: dict[Block, dict[int, str]] = {}
        for rank, observation in enumerate(self.observations):
            for offset, size, digest in observation["digests"].get(kind, {}).get(name, ()):
                digests_of.setdefault((tuple(offset), tuple(size)), {})[rank] = digest
        return digests_of

    def squared_tensor_error(self, kind: str, name: str, rank: int) -> float:
        return float(self.observations[rank]["tensors"][kind].get(name, ZERO_DOTS)[0])

    def find_sent_fault(self, name: str, step: int) -> str:
        """What is wrong with what compression sends of a gradient, in words; "" for nothing."""
        for observation in self.observations:
            for number, faulty, _, words in observation.get("sent_faults", ()):
                if (number, faulty) == (step, name):
                    return str(words)
        return ""

    def find_multiple_of_reference(
        self, kind: str, names: Sequence[str], rank: int
    ) -> float | None:
        """The factor by which a rank's part is a multiple of the reference; None if it is no
        multiple."""
        error, along, size = 0.0, 0.0, 0.0
        for name in names:
            dots = self.observations[rank]["tensors"][kind].get(name, ZERO_DOTS)
            error, along, size = error + dots[0], along + dots[2] - dots[3], size + dots[3]
        if not size or not error < math.inf:
            return None
        if error <= (MIN_EXPLAINED_TOLERANCE_SHARE * self.tolerance) ** 2 * size:
            return 1.0
        # The error has the direction of the reference: a - r = (f - 1) r. Where a layout rounds by
        # design it has it but for that.
        if (
            not along**2
            >= min(MIN_COSINE_SQUARED_OF_MULTIPLE, 1 - 4 * self.tolerance**2) * error * size
        ):
            return None
        return 1.0 + along / size


def replace_nan_by_infinity(error: float) -> float:
    """The error, NaN as infinity: comparisons with NaN are false, and would call it small."""
    if error != error:
        return math.inf
    return error


def blocks_cover_evenly(boxes_of_ranks: Sequence[Sequence[Box]]) -> bool:
    """True if the blocks of all ranks make one whole, each as often as the others, or as it says:
    none overlaps another in part."""
    count = Counter(itertools.chain.from_iterable(boxes_of_ranks))
    # A block that n ranks hold, while they differ in others, is there n times as often.
    if len({number / box[2] for box, number in count.items()}) > 1:
        return False
    blocks = [box[:2] for box in count]
    return not any(_do_boxes_overlap(a, b) for a, b in itertools.combinations(blocks, 2))


def _do_boxes_overlap(a: Block, b: Block) -> bool:
    spans = zip(*a, *b, strict=True)
    return all(
        start_a < start_b + size_b and start_b < start_a + size_a
        for start_a, size_a, start_b, size_b in spans
    )


def _parse_observed_boxes(observation: Mapping[str, Any], name: str) -> list[Box]:
    return [
        (tuple(offset), tuple(size), replicas)
        for offset, size, replicas in observation["boxes"].get(name, ())
    ]
