"""Host lists as Slurm writes them (`node[01-03,07],gpu5`), read without asking `scontrol`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_NUMBER_RANGE_PATTERN = re.compile(r"(\d+)(?:-(\d+))?")
# An IPv6 address with its zone, too.
_HOST_NAME_PATTERN = re.compile(r"[A-Za-z0-9._:%-]*")


@dataclass(frozen=True)
class _NumberRange:
    """The numbers `low` to `high`, written with at least `width` digits."""

    low: int
    high: int
    width: int

    def __len__(self) -> int:
        return self.high - self.low + 1

    def __iter__(self) -> Iterator[str]:
        return (f"{number:0{self.width}d}" for number in range(self.low, self.high + 1))


@dataclass(frozen=True)
class NodeList:
    """Hosts in the order in which they are written.

    Ranges stay ranges: a list of a million hosts costs nothing.
    """

    patterns: tuple[tuple[tuple[str | _NumberRange, ...], ...], ...]
    """Of each host pattern its parts in order; of each part the choices (one text, or the ranges
    of a bracket)."""

    def __len__(self) -> int:
        num_hosts = 0
        for pattern in self.patterns:
            num_hosts += math.prod(sum(map(_count_numbers_in_ranges, part)) for part in pattern)
        return num_hosts

    def __iter__(self) -> Iterator[str]:
        for pattern in self.patterns:
            yield from _expand_host_pattern(pattern)


def parse_slurm_node_list(text: str) -> NodeList:
    """The hosts of a Slurm node list. Raises ValueError with the reason for a text that is none."""
    patterns = tuple(
        _parse_host_pattern(pattern) for pattern in _split_outside_brackets(text.strip())
    )
    return NodeList(patterns)


def parse_slurm_tasks_per_node(text: str) -> list[int]:
    """Tasks of each node of Slurm's `2(x3),1`: [2, 2, 2, 1].

    Raises ValueError for a text that is none.
    """
    counts: list[int] = []
    for word in text.strip().split(","):
        # Bounded: 1(x999999999) would be a list of as many.
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,6})\))?", word.strip())
        if match is None:
            raise ValueError(f"{word.strip()!r} is not a number of tasks")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split_outside_brackets(text: str) -> list[str]:
    patterns, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise ValueError("its brackets do not match")
        if character == "," and depth == 0:
            patterns.append(text[start:index])
            start = index + 1
    if depth:
        raise ValueError("its brackets do not match")
    return [*patterns, text[start:]]


def _parse_host_pattern(pattern: str) -> tuple[tuple[str | _NumberRange, ...], ...]:
    parts: list[tuple[str | _NumberRange, ...]] = []
    for index, part in enumerate(re.split(r"[\[\]]", pattern.strip())):
        if index % 2:
            parts.append(tuple(_parse_number_range(word) for word in part.split(",")))
        elif _HOST_NAME_PATTERN.fullmatch(part):
            parts.append((part,))
        else:
            raise ValueError(f"{part!r} is not part of a host's name")
    if parts == [("",)]:
        raise ValueError("a host's name is empty")
    return tuple(parts)


def _parse_number_range(word: str) -> _NumberRange:
    match = _NUMBER_RANGE_PATTERN.fullmatch(word.strip())
    if match is None or len(word) > 40:
        raise ValueError(f"{word!r} is not a range of numbers")
    low, high = int(match[1]), int(match[2] or match[1])
    if high < low:
        raise ValueError(f"the range {word} goes down")
    return _NumberRange(low, high, len(match[1]))


def _count_numbers_in_ranges(choice: str | _NumberRange) -> int:
    if isinstance(choice, str):
        return 1
    return len(choice)


def _expand_host_pattern(pattern: tuple[tuple[str | _NumberRange, ...], ...]) -> Iterator[str]:
    """Hosts of one pattern, the last bracket counting fastest."""
    if not pattern:
        yield ""
        return
    for choice in pattern[0]:
        # A string's own iterator would give its letters.
        texts = (choice,) if isinstance(choice, str) else choice
        for text in texts:
            for rest in _expand_host_pattern(pattern[1:]):
                yield text + rest
