"""Groups the Python stacks of ranks by what they say: of many ranks most are in the same place, and
the odd one out is what a person must see."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.core.uncaught import is_library_file
from phalanx.observe.where_words import format_rank_list

MAX_SHOWN_GROUPS = 8
# Ranks with these frames in common, counted from the innermost one, do the same.
_NUM_COMPARED_FRAMES = 10
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')


@dataclass(frozen=True)
class StackGroup:
    """Ranks with the same stack; `frames` as faulthandler writes them, empty where they did not
    answer."""

    ranks: tuple[int, ...]
    frames: tuple[str, ...]


def group_stacks(
    stacks: Mapping[int, Sequence[str]], first: Sequence[int] = ()
) -> tuple[StackGroup, ...]:
    """The groups: those with ranks of `first` before the others, then the smaller ones."""
    ranks_with: dict[tuple[str, ...], list[int]] = {}
    for rank, lines in sorted(stacks.items()):
        frames = tuple(line.strip() for line in lines if line.lstrip().startswith("File"))
        ranks_with.setdefault(frames, []).append(rank)
    groups = [StackGroup(tuple(ranks), frames) for frames, ranks in ranks_with.items()]

    def sort_key(group: StackGroup) -> tuple[bool, int, int]:
        return not set(group.ranks) & set(first), len(group.ranks), group.ranks[0]

    return tuple(sorted(groups, key=sort_key))


def format_stack_groups(groups: Sequence[StackGroup]) -> list[str]:
    """Lines for people: the first groups with their stacks, the ranks of the others."""
    lines = []
    for group in groups[:MAX_SHOWN_GROUPS]:
        name = format_rank_list(group.ranks)
        if not group.frames:
            lines.append(f"{name}: did not answer")
            continue
        lines.append(f"{name}:")
        lines += [f"  {frame}" for frame in group.frames]
    remaining = sorted(rank for group in groups[MAX_SHOWN_GROUPS:] for rank in group.ranks)
    if remaining:
        lines.append(f"{format_rank_list(remaining)}: other stacks, not shown")
    return lines


def find_odd_ranks(stacks: Mapping[int, Sequence[str]]) -> tuple[int, ...]:
    """The ranks outside the largest group, if that has more than half of all; else none."""
    # The title of a stack is no frame of it.
    groups = group_stacks(
        {rank: lines[: 1 + _NUM_COMPARED_FRAMES] for rank, lines in stacks.items()}
    )
    largest = max(groups, key=lambda group: len(group.ranks), default=None)
    if largest is None or len(largest.ranks) * 2 <= len(stacks):
        return ()
    return tuple(sorted(stacks.keys() - set(largest.ranks)))


def find_telling_line(stack: Sequence[str]) -> str:
    """The innermost line of the user's own code in a stack, or the innermost line of all: "spin at
    train.py:12". Empty for a stack without frames."""
    innermost = ""
    for match in filter(None, map(_FRAME.search, stack)):
        place = f"{os.path.basename(match['file'])}:{match['line']}"
        text = f"{match['function']} at {place}"
        if not is_library_file(match["file"]):
            return text
        innermost = innermost or text
    return innermost
