"""Explains gradients in which parts of a batch do not count once, by which of them do not.
Torch-free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.verify.factors import format_factor

# Of a count, which is 1: rounding, and what other sequences look like; and of the count that is
# furthest from 1, where that is less.
TOLERANCE_OF_DTYPE = {"float64": 1e-5, "float32": 1e-2}
TOLERANCE_OF_LARGEST = 1e-2
MAX_SHARE_OF_FEW_PARTS = 1 / 3
MAX_LISTED = 4


@dataclass(frozen=True)
class CountedPart:
    """A sequence of a step, or those of its tokens that are in one chunk of logits of a rank: how
    many times it counts in gradients, its number of targets, its microbatch, the data-parallel rank
    that has it, the sequence's place among those of that rank, and the chunk (-1 where sequences
    are whole); all counted from 0."""

    count: float
    num_targets: int
    microbatch: int
    rank: int
    place: int
    chunk: int


class RowDiagnosis:
    """Finds the parts of a batch that do not count once."""

    def __init__(self, observations: Sequence[Mapping[str, Any]], dtype: str) -> None:
        self._observations = observations
        self._most = TOLERANCE_OF_DTYPE.get(dtype, 0.0)

    def explain(self, step: int) -> str:
        """The cause of gradients of `step` that are a sum over parts of the batch, of which some do
        not count once; "" if they are not, or all count alike."""
        part_counts = [observed.get("part_counts", {}) for observed in self._observations]
        if not all(body.get("step") == step for body in part_counts):
            return ""
        off = [rank for rank, body in enumerate(part_counts) if body["is_off"]]
        first = part_counts[off[0]]
        if first["counts"] is None:
            return ""
        largest = max((abs(count - 1) for count in first["counts"] if count == count), default=0.0)
        tolerance = min(self._most, TOLERANCE_OF_LARGEST * largest)
        if not tolerance or not all(
            _are_equal(first["counts"], part_counts[rank]["counts"], tolerance) for rank in off
        ):
            return ""
        counted = CountedBatch(
            _list_parts(first["counts"], first["parts"], first["rows_of_rank"]),
            1 + max(body[0] for body in first["parts"]),
            tolerance,
        )
        where = "" if len(off) == len(part_counts) else f" on rank {', '.join(map(str, off))}"
        cause = counted.explain()
        return cause and f"gradients{where} are a sum over sequences, {cause}"


def _are_equal(
    counts: Sequence[float], other_counts: Sequence[float] | None, tolerance: float
) -> bool:
    return other_counts is not None and all(
        abs(a - b) <= tolerance * max(1.0, abs(a)) or (a != a and b != b)
        for a, b in zip(counts, other_counts, strict=True)
    )


@dataclass(frozen=True)
class CountedBatch:
    """The parts of a step's batch, and how many times each counts in its gradients, within
    `tolerance`."""

    parts: Sequence[CountedPart]
    num_microbatches: int
    tolerance: float

    def explain(self) -> str:
        """Which parts do not count once; "" where all count alike, or nothing tells them apart."""
        if not self.parts or self._is_one_count([part.count for part in self.parts]):
            return ""
        return (
            self._explain_means()
            or self._explain_groups(
                lambda part: f"microbatch {part.microbatch + 1} of {self.num_microbatches}",
            )
            or self._explain_groups(lambda part: f"data-parallel rank {part.rank}")
            or self._explain_groups(
                lambda part: f"chunk {part.chunk + 1} of the logits of a rank's microbatch"
            )
            or self._explain_groups(
                lambda part: f"place {part.place + 1} of each microbatch of a rank"
            )
            or self._explain_few_parts()
            or self._explain_groups(
                lambda part: f"microbatch {part.microbatch + 1} of data-parallel rank {part.rank}",
            )
        )

    def _explain_means(self) -> str:
        """The cause where a part counts the less the more targets those have that it belongs to."""
        groupings: tuple[tuple[Callable[[CountedPart], Hashable], str], ...] = (
            (lambda part: part.microbatch, "microbatches"),
            (lambda part: part.rank, "data-parallel ranks"),
            (lambda part: (part.microbatch, part.rank), "microbatches of each data-parallel rank"),
            (lambda part: (part.microbatch, part.rank, part.place), "sequences"),
            (lambda part: (part.microbatch, part.rank, part.chunk), "chunks of logits"),
        )
        for key, words in groupings:
            totals: dict[Hashable, int] = {}
            for part in self.parts:
                totals[key(part)] = totals.get(key(part), 0) + part.num_targets
            products = [part.count * totals[key(part)] for part in self.parts]
            largest = max(map(abs, products))
            if len(set(totals.values())) > 1 and (
                max(products) - min(products) <= self.tolerance * largest
            ):
                return (
                    f"in which {words} count alike, however many targets each has: a mean of means"
                )
        return ""

    def _explain_groups(self, name_group: Callable[[CountedPart], str]) -> str:
        """The cause where all parts of a group count alike, and not those of all groups."""
        counts: dict[str, list[float]] = {}
        for part in self.parts:
            counts.setdefault(name_group(part), []).append(part.count)
        if len(counts) < 2 or not all(map(self._is_one_count, counts.values())):
            return ""
        off = {
            group: of_group[0]
            for group, of_group in counts.items()
            if abs(of_group[0] - 1) > self.tolerance
        }
        listed = ", ".join(
            f"those of {group} ({self._describe(count)})"
            for group, count in itertools.islice(off.items(), MAX_LISTED)
        )
        if len(off) > MAX_LISTED:
            listed += f" and {len(off) - MAX_LISTED} more"
        rest = "" if len(off) == len(counts) else ", and all others do count once"
        return f"of which not all count once: {listed}{rest}"

    def _explain_few_parts(self) -> str:
        off = [part for part in self.parts if abs(part.count - 1) > self.tolerance]
        if not 0 < len(off) <= MAX_SHARE_OF_FEW_PARTS * len(self.parts):
            return ""
        part = off[0]
        chunk = "" if part.chunk < 0 else f"chunk {part.chunk + 1} of the logits, "
        return (
            f"of which some tokens do not count once: the first are in {chunk}sequence"
            f" {part.place + 1} of data-parallel rank {part.rank}, microbatch"
            f" {part.microbatch + 1} ({self._describe(part.count)})"
        )

    def _describe(self, count: float) -> str:
        if abs(count) <= self.tolerance:
            return "left out"
        # Without what may be rounding.
        return format_factor(round(count, -math.floor(math.log10(self.tolerance))))

    def _is_one_count(self, counts: Sequence[float]) -> bool:
        return max(counts) - min(counts) <= self.tolerance * max(1.0, *map(abs, counts))


def _list_parts(
    counts: Sequence[float], parts: Sequence[tuple[int, int, int, int]], rows_of_rank: int
) -> list[CountedPart]:
    """The parts that owe something to gradients."""
    return [
        CountedPart(count, num_targets, microbatch, row // rows_of_rank, row % rows_of_rank, chunk)
        for count, (microbatch, row, chunk, num_targets) in zip(counts, parts, strict=True)
        if not math.isnan(count) and num_targets
    ]
