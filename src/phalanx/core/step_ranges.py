"""Ranges of steps as people write them: "100" or "100:103", both ends included."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

# A trace holds every span of every rank: more steps than these are a file that no viewer opens.
MAX_TRACED_STEPS = 100
# Of the profiler each step has tens of thousands of operators.
MAX_PROFILED_STEPS = 10

# As many digits as 10**12 - 1: a step travels as a part of one float between ranks.
_STEP_RANGE_PATTERN = re.compile(r"([0-9]{1,12})(?::([0-9]{1,12}))?")


class StepRange(NamedTuple):
    """The steps from `first` to `last`, both included."""

    first: int
    last: int

    @property
    def num_steps(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        if self.first == self.last:
            return str(self.first)
        return f"{self.first}:{self.last}"


def parse_step_range(text: str | int) -> StepRange:
    """The range that `text` says. Raises ValueError with words for the person who wrote it."""
    match = _STEP_RANGE_PATTERN.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is no range of steps")
    first = int(match[1])
    last = int(match[2] or match[1])
    if first < 1:
        raise ValueError(f"{text!r} begins before step 1, which is the first")
    if last < first:
        raise ValueError(f"{text!r} ends before it begins")
    return StepRange(first, last)


def merge_step_ranges(ranges: Iterable[StepRange]) -> list[StepRange]:
    """The same steps as ranges with gaps between them, in order."""
    merged: list[StepRange] = []
    for each in sorted(ranges):
        if merged and each.first <= merged[-1].last + 1:
            merged[-1] = StepRange(merged[-1].first, max(merged[-1].last, each.last))
        else:
            merged.append(each)
    return merged


def count_steps(ranges: Iterable[StepRange]) -> int:
    """The number of steps in ranges that do not overlap."""
    return sum(each.num_steps for each in ranges)
