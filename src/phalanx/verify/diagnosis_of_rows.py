"""Explains gradients in which the sequences of a batch count otherwise than they should, by which
of them do. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.verify.factors import format_factor

# Of a count, which is 1: rounding, and what other sequences look like.
TOLERANCE_OF_DTYPE = {"float64": 1e-5, "float32": 1e-2}
MAX_SHARE_OF_FEW_ROWS = 1 / 3


@dataclass(frozen=True)
class CountedRow:
    """A sequence of a step: how many times it counts in gradients, its number of targets, the
    microbatch that it is in, and the data-parallel rank that has it as one of its own, all counted
    from 0."""

    count: float
    num_targets: int
    microbatch: int
    rank: int
    place: int


class RowDiagnosis:
    """Finds the sequences that count otherwise than once."""

    def __init__(self, observations: Sequence[Mapping[str, Any]], dtype: str) -> None:
        self._observations = observations
        self._tolerance = TOLERANCE_OF_DTYPE.get(dtype, 0.0)

    def explain(self, step: int) -> str:
        """The cause of gradients of `step` that are a sum over sequences, of which some count
        otherwise; "" if they are not, or all count alike."""
        found = [observed.get("row_counts", {}) for observed in self._observations]
        if not all(body.get("step") == step for body in found):
            return ""
        off = [rank for rank, body in enumerate(found) if body["is_off"]]
        counts, targets = found[off[0]]["counts"], found[off[0]]["targets"]
        num_shares = found[off[0]]["num_shares"]
        if counts is None or not all(
            self._are_equal(counts, found[rank]["counts"]) for rank in off
        ):
            return ""
        where = "" if len(off) == len(found) else f" on rank {', '.join(map(str, off))}"
        rows = _list_rows(counts, targets, num_shares)
        cause = self._explain_rows(rows, len(targets))
        return cause and f"gradients{where} are a sum over sequences, {cause}"

    def _are_equal(self, counts: Sequence[float], others: Sequence[float] | None) -> bool:
        return others is not None and all(
            abs(a - b) <= self._tolerance * max(1.0, abs(a)) or (a != a and b != b)
            for a, b in zip(counts, others, strict=True)
        )

    def _explain_rows(self, rows: Sequence[CountedRow], num_microbatches: int) -> str:
        if not rows or self._is_one_count([row.count for row in rows]):
            return ""
        return (
            self._explain_means(rows)
            or self._explain_groups(
                rows, lambda row: row.microbatch, f"microbatch {{}} of {num_microbatches}"
            )
            or self._explain_groups(rows, lambda row: row.rank, "data-parallel rank {}", first=0)
            or self._explain_groups(
                rows, lambda row: row.place, "place {} of each microbatch of a rank"
            )
            or self._explain_few_rows(rows)
        )

    def _explain_means(self, rows: Sequence[CountedRow]) -> str:
        """The cause where a sequence counts the less the more targets those have that it belongs
        to."""
        groupings: tuple[tuple[Callable[[CountedRow], Hashable], str], ...] = (
            (lambda row: row.microbatch, "microbatches"),
            (lambda row: row.rank, "data-parallel ranks"),
            (lambda row: (row.microbatch, row.rank), "microbatches of each data-parallel rank"),
            (lambda row: (row.microbatch, row.rank, row.place), "sequences"),
        )
        for key, words in groupings:
            totals: dict[Hashable, int] = {}
            for row in rows:
                totals[key(row)] = totals.get(key(row), 0) + row.num_targets
            if len(totals) > 1 and self._is_one_number(
                [row.count * totals[key(row)] for row in rows]
            ):
                return (
                    f"in which {words} count alike, however many targets each has: a mean of means"
                )
        return ""

    def _explain_groups(
        self,
        rows: Sequence[CountedRow],
        key: Callable[[CountedRow], int],
        words: str,
        *,
        first: int = 1,
    ) -> str:
        """The cause where all sequences of a group count alike, and not those of all groups."""
        counts: dict[int, list[float]] = {}
        for row in rows:
            counts.setdefault(key(row), []).append(row.count)
        if len(counts) < 2 or not all(map(self._is_one_count, counts.values())):
            return ""
        off = {
            group: of_rows[0]
            for group, of_rows in sorted(counts.items())
            if abs(of_rows[0] - 1) > self._tolerance
        }
        listed = ", ".join(
            f"those of {words.format(group + first)} ({self._describe(count)})"
            for group, count in list(off.items())[:4]
        )
        others = "" if len(off) == len(counts) else ", and all others do count once"
        return f"of which not all count once: {listed}{others}"

    def _explain_few_rows(self, rows: Sequence[CountedRow]) -> str:
        off = [row for row in rows if abs(row.count - 1) > self._tolerance]
        if not 0 < len(off) <= MAX_SHARE_OF_FEW_ROWS * len(rows):
            return ""
        row = off[0]
        return (
            f"of which {len(off)} of {len(rows)} do not count once: the first is sequence"
            f" {row.place + 1} of data-parallel rank {row.rank} in microbatch {row.microbatch + 1}"
            f" ({self._describe(row.count)})"
        )

    def _describe(self, count: float) -> str:
        if abs(count) <= self._tolerance:
            return "left out"
        # Without what may be rounding.
        return format_factor(round(count, -math.floor(math.log10(self._tolerance))))

    def _is_one_count(self, counts: Sequence[float]) -> bool:
        return max(counts) - min(counts) <= self._tolerance * max(1.0, *map(abs, counts))

    def _is_one_number(self, numbers: Sequence[float]) -> bool:
        return max(numbers) - min(numbers) <= self._tolerance * max(map(abs, numbers))


def _list_rows(
    counts: Sequence[float], targets: Sequence[Sequence[int]], num_shares: int
) -> list[CountedRow]:
    """The sequences that have a part in gradients; each microbatch is shared out over `num_shares`
    data-parallel ranks."""
    rows, remaining = [], iter(counts)
    for microbatch, of_rows in enumerate(targets):
        per_rank = max(1, len(of_rows) // num_shares)
        for number, num_targets in enumerate(of_rows):
            rank, place = divmod(number, per_rank)
            row = CountedRow(next(remaining), num_targets, microbatch, rank, place)
            if not math.isnan(row.count) and num_targets:
                rows.append(row)
    return rows
