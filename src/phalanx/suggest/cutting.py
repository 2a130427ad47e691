"""How a row and the columns that feed it can be cut alike: by features, by heads or by groups of heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.suggest.flow import Flow, sum_mixed

NUM_SAMPLES = 12  # features of a row's input that are followed back
MOST_FOLLOWED = 2048  # features, where all of them must be


def needed(flow: Flow, row: str, columns: Sequence[str], feature: int) -> list[list[int]]:
    """Of each column's output the features that feature `feature` of the row's input depends on."""
    outputs = [flow.outputs[name] for name in columns]
    grads = torch.autograd.grad(
        sum_mixed(flow.inputs[row][..., feature]), outputs, allow_unused=True, retain_graph=True
    )
    return [
        [] if grad is None else torch.nonzero(grad.flatten(0, -2).abs().sum(0)).flatten().tolist() for grad in grads
    ]


@dataclass(frozen=True)
class Cutting:
    """How a row and the columns that feed it can be cut alike: the options of their rules, and what they count.

    `heads`: of each part of each column, in their order; 0 where features are cut one by one.
    """

    columns: tuple[str, ...]
    row: str
    num_heads: int
    counts: Mapping[
        int, int
    ]  # what an integer of the module may say -> heads it counts features of (0: it counts heads)
    degrees: tuple[int, ...]  # of tp to try it with
    why: str


def find_cutting(flow: Flow, row: str, columns: Sequence[str]) -> Cutting | None:
    """None where features depend on each other otherwise than within heads, or one by one."""
    width = flow.inputs[row].shape[-1]
    widths = [flow.outputs[name].shape[-1] for name in columns]
    samples = sorted({*range(min(3, width)), width - 1, *(width * i // NUM_SAMPLES for i in range(NUM_SAMPLES))})
    seen = {feature: needed(flow, row, columns, feature) for feature in samples}
    seen = {feature: found for feature, found in seen.items() if all(found)}
    if len(seen) < 2:
        return None
    return _by_features(seen, width, widths) or _by_heads(seen, width, widths) or _by_groups(flow, row, columns)


def _by_features(seen: Mapping[int, list[list[int]]], width: int, widths: Sequence[int]) -> Cutting | None:
    parts = [w // width for w in widths]
    for feature, found in seen.items():
        for needs, count, size in zip(found, parts, widths, strict=True):
            if size % width or needs != [feature + width * part for part in range(count)]:
                return None
    texts = tuple("column" if count == 1 else f"column parts={count}" for count in parts)
    return Cutting(texts, "row", 0, {width: 0, **dict.fromkeys(widths, 0)}, (2, 3), "feature by feature")


def _by_heads(seen: Mapping[int, list[list[int]]], width: int, widths: Sequence[int]) -> Cutting | None:
    """A feature behind attention depends on all of a head's query and key, and on one feature of its value."""
    starts = [_runs(needs) for needs in seen[min(seen)]]
    parts = [  # of each column: (start, size, features of one head that were seen)
        [
            (start, end - start, length)
            for (start, length), end in zip(runs, [r[0] for r in runs[1:]] + [size], strict=True)
        ]
        for runs, size in zip(starts, widths, strict=True)
    ]
    longest = [size // length for column in parts for _, size, length in column if length > 1]
    if not longest or any(column[0][0] for column in parts):
        return None
    num_heads = max(longest)
    if num_heads < 2 or width % num_heads:
        return None
    each = width // num_heads
    texts, every, counts = [], [], {width: num_heads, num_heads: 0}
    for index, column in enumerate(parts):
        heads = []
        for start, size, length in column:
            unit = length if length > 1 else each
            count = size // unit
            if (
                count * unit != size
                or not count
                or num_heads % count
                or unit != (column[0][2] if column[0][2] > 1 else each)
            ):
                return None
            for feature, found in seen.items():
                first = start + feature // each * count // num_heads * unit
                mine = [f for f in found[index] if start <= f < start + size]
                if not mine or not first <= mine[0] <= mine[-1] < first + unit:
                    return None
            heads.append(count)
            counts |= {count: 0, size: count}
        every += heads
        texts.append("column heads=" + "+".join(_heads_text(count, num_heads) for count in heads))
    fewest = min(every)
    legal = [d for d in range(2, num_heads + 1) if num_heads % d == 0 and (fewest % d == 0 or d % fewest == 0)]
    grouped = f", {fewest} of keys and values" if fewest < num_heads else ""
    why = f"head by head: {num_heads} heads{grouped}"
    return Cutting(tuple(texts), f"row heads={num_heads}", num_heads, counts, tuple({legal[0], legal[-1]}), why)


def _heads_text(count: int, queries: int) -> str:
    return str(count) if count == queries else f"{count}/{queries}"


def _by_groups(flow: Flow, row: str, columns: Sequence[str]) -> Cutting | None:
    """Heads that share something which is mixed into one matrix with them: groups of heads, in order."""
    width = flow.inputs[row].shape[-1]
    widths = [flow.outputs[name].shape[-1] for name in columns]
    if width > MOST_FOLLOWED:
        return None
    group_of: dict[tuple[int, int], int] = {}
    number = -1
    for feature in range(width):
        keys = [(i, f) for i, needs in enumerate(needed(flow, row, columns, feature)) for f in needs]
        known = {group_of[key] for key in keys if key in group_of}
        if not keys or len(known) > 1 or (known and known != {number}):
            return None  # groups that are not one after another
        number += not known
        group_of |= dict.fromkeys(keys, number)
    groups = number + 1
    if groups < 2 or width % groups or any(size % groups for size in widths):
        return None
    for index, size in enumerate(widths):
        if any(group_of.get((index, f)) != f * groups // size for f in range(size)):
            return None
    degrees = [d for d in range(2, groups + 1) if groups % d == 0]
    counts = {groups: 0, width: groups, **dict.fromkeys(widths, groups)}
    why = f"group by group: {groups} heads, or groups of them, each with all that is its own side by side"
    text = f"column heads={groups}"
    return Cutting((text,) * len(columns), f"row heads={groups}", groups, counts, (degrees[0], degrees[-1]), why)


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """(start, length) of each run of successive ones."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs
