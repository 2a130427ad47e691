"""From rows to medians, ratios and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from phalanx.core.units import MIB
from throughput.cases import BARE, CEILING, NO_SINKS, PHALANX, WHOLE_LOGITS

Record = Mapping[str, Any]  # one line of the results file


@dataclass(frozen=True)
class Ratio:
    """`a` over `b` of the same case: the ratio of their medians, and the extremes of it
    repetition by repetition."""

    value: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        return f"{self.value:.3f}" + (
            f" ({self.low:.3f} to {self.high:.3f})" if self.num_pairs > 1 else ""
        )


def value_of(record: Record, quantity: str) -> float:
    """`quantity` of a record; of a list, which has one value for each rank, the largest."""
    value = record[quantity]
    return float(max(value) if isinstance(value, list) else value)


def values_by_repeat(
    records: Sequence[Record], case: str, contender: str, quantity: str
) -> dict[int, float]:
    """What was measured, by repetition; failed rows have no values."""
    return {
        record["repeat"]: value_of(record, quantity)
        for record in records
        if record["case"]["name"] == case
        and record["contender"] == contender
        and "error" not in record
    }


def median_of(records: Sequence[Record], case: str, contender: str, quantity: str) -> float | None:
    """None if nothing was measured."""
    values = values_by_repeat(records, case, contender, quantity)
    return median(values.values()) if values else None


def ratio_of(records: Sequence[Record], case: str, a: str, b: str, quantity: str) -> Ratio | None:
    """`a` over `b`, from repetitions that both have; None if there is none."""
    of_a, of_b = (values_by_repeat(records, case, contender, quantity) for contender in (a, b))
    both = sorted(of_a.keys() & of_b.keys())
    if not both:
        return None
    pairs = [of_a[repeat] / of_b[repeat] for repeat in both]
    value = median(of_a[repeat] for repeat in both) / median(of_b[repeat] for repeat in both)
    return Ratio(value, min(pairs), max(pairs), len(pairs))


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


COLUMNS = (
    "case",
    "tokens/s",
    "bare",
    "no talk",
    "÷ bare",
    "÷ no talk",
    "first step s",
    "bare",
    "÷ bare",
    "peak MiB",
    "bare",
    "÷ bare",
)


def table(records: Sequence[Record]) -> list[list[str]]:
    """Header and one line for each case: phalanx, the bare loop, the ceiling, and their ratios."""
    lines = [list(COLUMNS)]
    for case in cases_of(records):
        cells = [case]
        for contender in (PHALANX, BARE, CEILING):
            cells.append(_number(median_of(records, case, contender, "tokens_per_s"), ",.0f"))
        cells += [_ratio(records, case, other, "tokens_per_s") for other in (BARE, CEILING)]
        for quantity, scale, form in (("first_step_s", 1.0, ".1f"), ("peak_bytes", MIB, ",.0f")):
            for contender in (PHALANX, BARE):
                value = median_of(records, case, contender, quantity)
                cells.append(_number(None if value is None else value / scale, form))
            cells.append(_ratio(records, case, BARE, quantity))
        lines.append(cells)
    return lines


def extra_lines(records: Sequence[Record]) -> list[str]:
    """What the optional rows say, and the means over cases."""
    lines = []
    for other, label in ((BARE, "the bare loop"), (CEILING, "two ranks that never talk")):
        found = [
            ratio_of(records, case, PHALANX, other, "tokens_per_s") for case in cases_of(records)
        ]
        values = [ratio.value for ratio in found if ratio is not None]
        if values:
            mean = geometric_mean(values)
            lines.append(
                f"tokens/s over {label}: {mean:.3f} (geometric mean of {len(values)}, least"
                f" {min(values):.3f})"
            )
    for case in cases_of(records):
        overhead = ratio_of(records, case, PHALANX, NO_SINKS, "median_step_s")
        if overhead is not None:
            lines.append(f"{case}: step time with default sinks over none: {overhead}")
        for quantity, label in (("tokens_per_s", "tokens/s"), ("peak_bytes", "peak memory")):
            whole = ratio_of(records, case, PHALANX, WHOLE_LOGITS, quantity)
            if whole is not None:
                lines.append(f"{case}: {label} over the bare loop with whole logits: {whole}")
    return lines


def cases_of(records: Sequence[Record]) -> list[str]:
    """Names in the order of their first record."""
    return list(dict.fromkeys(record["case"]["name"] for record in records))


def as_text(lines: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, numbers to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def as_markdown(lines: Sequence[Sequence[str]]) -> str:
    header, *rest = lines
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rest))


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _ratio(records: Sequence[Record], case: str, other: str, quantity: str) -> str:
    ratio = ratio_of(records, case, PHALANX, other, quantity)
    return "" if ratio is None else str(ratio)
