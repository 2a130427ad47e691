"""Seconds that lie in a step or two: what befalls a run once is no cause that goes on."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.report.bottleneck.step_table import StepTable
from phalanx.report.formats import format_percent

FEW_STEPS = 2
"""So many steps alone tell of nothing that goes on."""


def sum_beyond_few_steps(table: StepTable, seconds: Sequence[float]) -> float:
    """The sum of some seconds of each step without the FEW_STEPS that have most; of rows that are
    means of several steps the whole sum."""
    if table.num_covered != table.num_steps:
        return sum(seconds)
    return sum(sorted(seconds)[:-FEW_STEPS])


def describe_few_steps(table: StepTable, seconds: Sequence[float]) -> list[str]:
    """A line that names FEW_STEPS at most that have more than half of some seconds of each step;
    none where it takes more of them, or rows are means of several steps."""
    whole_s = sum(seconds)
    if table.num_covered != table.num_steps or not whole_s > 0:
        return []
    ascending = sorted(range(len(seconds)), key=seconds.__getitem__)
    for count in range(1, FEW_STEPS + 1):
        few_s = sum(seconds[index] for index in ascending[-count:])
        if few_s > whole_s / 2:
            names = " and ".join(f"{table.steps[index]:,}" for index in sorted(ascending[-count:]))
            noun = "step" if count == 1 else "steps"
            return [f"{format_percent(few_s, whole_s)} of that is in {noun} {names} alone"]
    return []
