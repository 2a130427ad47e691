"""How a row and the columns that feed it can be cut alike: by features, by heads or by groups of
heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.suggest.flow import ForwardFlow, sum_with_distinct_weights

NUM_SAMPLED_FEATURES = 12  # features of a row's input that are followed back
MAX_FOLLOWED_FEATURES = 2048  # features, where all of them must be


def find_needed_features(
    flow: ForwardFlow, row: str, columns: Sequence[str], feature: int
) -> list[list[int]]:
    """The features of each column's output that feature `feature` of the row's input depends on."""
    outputs = [flow.outputs[name] for name in columns]
    grads = torch.autograd.grad(
        sum_with_distinct_weights(flow.inputs[row][..., feature]),
        outputs,
        allow_unused=True,
        retain_graph=True,
    )
    needs: list[list[int]] = []
    for grad in grads:
        if grad is None:
            needs.append([])
        else:
            # abs: what two rows of the batch give must not cancel.
            needs.append(torch.nonzero(grad.flatten(0, -2).abs().sum(0)).flatten().tolist())
    return needs


@dataclass(frozen=True)
class CutProposal:
    """A way to cut a row and the columns that feed it alike.

    `columns` and `row` are their rules. `num_heads` is 0 where features are cut one by one.
    `counts`: what an integer of the module may say -> heads it counts features of (0: it counts
    heads). `degrees`: those of tp to try it with.
    """

    columns: tuple[str, ...]
    row: str
    num_heads: int
    counts: Mapping[int, int]
    degrees: tuple[int, ...]
    why: str


def find_cut_proposal(flow: ForwardFlow, row: str, columns: Sequence[str]) -> CutProposal | None:
    """The way to cut `columns` (column-parallel) so that `row` can be row-parallel: per feature,
    head or group.

    None if an input feature of `row` depends on more than one head, or group of heads.
    """
    width = flow.inputs[row].shape[-1]
    widths = [flow.outputs[name].shape[-1] for name in columns]
    # Each costs a backward: both ends, and some between.
    samples = {*range(min(3, width)), width - 1}
    samples |= {width * index // NUM_SAMPLED_FEATURES for index in range(NUM_SAMPLED_FEATURES)}
    needs_of_feature = {}
    for feature in sorted(samples):
        needs = find_needed_features(flow, row, columns, feature)
        # A feature that is off in the whole batch (behind a ReLU) has no gradient: no clue.
        if all(needs):
            needs_of_feature[feature] = needs
    if len(needs_of_feature) < 2:
        return None
    # From the finest cut, which most degrees of tp fit, to the one that follows every feature.
    return (
        _cut_by_features(needs_of_feature, width, widths)
        or _cut_by_heads(needs_of_feature, width, widths)
        or _cut_by_groups(flow, row, columns)
    )


def _cut_by_features(
    needs_of_feature: Mapping[int, list[list[int]]], width: int, widths: Sequence[int]
) -> CutProposal | None:
    parts = [size // width for size in widths]
    for feature, needs_of_columns in needs_of_feature.items():
        for needs, count, size in zip(needs_of_columns, parts, widths, strict=True):
            if size % width or needs != [feature + width * part for part in range(count)]:
                return None
    texts = tuple("column" if count == 1 else f"column parts={count}" for count in parts)
    counts = {width: 0, **dict.fromkeys(widths, 0)}
    return CutProposal(texts, "row", 0, counts, (2, 3), "feature by feature")


@dataclass(frozen=True)
class _ColumnPart:
    """Successive features of a column's output.

    `run`: how many of them one feature of the row needs.
    """

    start: int
    size: int
    run: int

    def find_head_features(self, head_width: int) -> int:
        """The features of one head: a run, or those of a head of the row if single ones are
        needed."""
        if self.run > 1:
            return self.run
        return head_width


def _cut_by_heads(
    needs_of_feature: Mapping[int, list[list[int]]], width: int, widths: Sequence[int]
) -> CutProposal | None:
    """A cut by heads: behind attention a feature depends on one head's query and key, and on one
    of its values."""
    columns = _split_columns_into_parts(needs_of_feature[min(needs_of_feature)], widths)
    num_heads = _count_heads_of_largest_part(columns)
    if num_heads < 2 or width % num_heads:
        return None
    head_width = width // num_heads
    texts: list[str] = []
    heads_of_parts: list[int] = []
    counts = {width: num_heads, num_heads: 0}
    for index, parts in enumerate(columns):
        unit = parts[0].find_head_features(head_width)
        needs = {feature: by_column[index] for feature, by_column in needs_of_feature.items()}
        for part in parts:
            has_unit = part.find_head_features(head_width) == unit
            if not has_unit or not _needs_only_own_head(part, unit, num_heads, head_width, needs):
                return None
        heads = [part.size // unit for part in parts]
        for part, count in zip(parts, heads, strict=True):
            counts |= {count: 0, part.size: count}
        heads_of_parts += heads
        texts.append("column heads=" + "+".join(_format_heads(count, num_heads) for count in heads))
    fewest = min(heads_of_parts)
    divisors = [degree for degree in range(2, num_heads + 1) if num_heads % degree == 0]
    # Fewer heads of keys and values than ranks: each of these heads is on several of them.
    legal = [degree for degree in divisors if fewest % degree == 0 or degree % fewest == 0]
    why = f"head by head: {num_heads} heads"
    if fewest < num_heads:
        why += f", {fewest} of keys and values"
    return CutProposal(
        tuple(texts),
        f"row heads={num_heads}",
        num_heads,
        counts,
        tuple({legal[0], legal[-1]}),
        why,
    )


def _split_columns_into_parts(
    needs: Sequence[Sequence[int]], widths: Sequence[int]
) -> list[list[_ColumnPart]]:
    """The parts of each column's output: a new one starts with each run of features that are
    needed."""
    columns = []
    for features, size in zip(needs, widths, strict=True):
        runs = _find_consecutive_runs(features)
        ends = [start for start, _ in runs[1:]] + [size]
        parts = []
        for (start, run), end in zip(runs, ends, strict=True):
            parts.append(_ColumnPart(start, end - start, run))
        columns.append(parts)
    return columns


def _count_heads_of_largest_part(columns: Sequence[Sequence[_ColumnPart]]) -> int:
    """The most heads that a part has; 0 if features are needed one by one, or not from the first
    one on."""
    if any(parts[0].start for parts in columns):
        return 0
    num_heads = 0
    for parts in columns:
        for part in parts:
            if part.run > 1:
                num_heads = max(num_heads, part.size // part.run)
    return num_heads


def _needs_only_own_head(
    part: _ColumnPart,
    unit: int,
    num_heads: int,
    head_width: int,
    needs: Mapping[int, Sequence[int]],
) -> bool:
    """True if each feature of the row needs features of its own head alone, of those in `part`."""
    count = part.size // unit
    if not count or count * unit != part.size or num_heads % count:
        return False
    for feature, needed in needs.items():
        # The head of the row's feature, the head of this part that it shares, its first feature.
        first = part.start + feature // head_width * count // num_heads * unit
        inside = [index for index in needed if part.start <= index < part.start + part.size]
        if not inside or not first <= inside[0] <= inside[-1] < first + unit:
            return False
    return True


def _format_heads(count: int, queries: int) -> str:
    if count == queries:
        return str(count)
    return f"{count}/{queries}"


def _cut_by_groups(flow: ForwardFlow, row: str, columns: Sequence[str]) -> CutProposal | None:
    """A cut by groups of heads in order, where heads share something that is mixed into one
    matrix with them."""
    width = flow.inputs[row].shape[-1]
    widths = [flow.outputs[name].shape[-1] for name in columns]
    if width > MAX_FOLLOWED_FEATURES:
        return None
    group_of = _map_features_to_groups(flow, row, columns)
    if group_of is None:
        return None
    groups = max(group_of.values()) + 1
    if groups < 2 or width % groups or any(size % groups for size in widths):
        return None
    for index, size in enumerate(widths):
        for feature in range(size):
            # Groups are equal stretches of each column, one after the other.
            if group_of.get((index, feature)) != feature * groups // size:
                return None
    degrees = [degree for degree in range(2, groups + 1) if groups % degree == 0]
    counts = {groups: 0, width: groups, **dict.fromkeys(widths, groups)}
    why = (
        f"group by group: {groups} heads, or groups of them, each with all that is its own side by"
        " side"
    )
    text = f"column heads={groups}"
    return CutProposal(
        (text,) * len(columns),
        f"row heads={groups}",
        groups,
        counts,
        (degrees[0], degrees[-1]),
        why,
    )


def _map_features_to_groups(
    flow: ForwardFlow, row: str, columns: Sequence[str]
) -> dict[tuple[int, int], int] | None:
    """(column, feature of its output) -> the group that needs it; None if groups are not one
    after another."""
    group_of: dict[tuple[int, int], int] = {}
    number = -1
    for feature in range(flow.inputs[row].shape[-1]):
        keys = []
        for index, needed in enumerate(find_needed_features(flow, row, columns, feature)):
            keys += [(index, column_feature) for column_feature in needed]
        known = {group_of[key] for key in keys if key in group_of}
        # A feature belongs to the group of the one before it, or begins the next.
        if not keys or len(known) > 1 or (known and known != {number}):
            return None
        number += not known
        group_of |= dict.fromkeys(keys, number)
    return group_of


def _find_consecutive_runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """(start, length) of each run of successive ones."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs
