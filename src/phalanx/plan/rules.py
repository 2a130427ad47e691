"""Sharding rules: how tensor parallelism cuts the modules of a model, as data. Torch-free.

A rule is a line of text for the modules whose name matches a pattern (`blocks.*.attention.q`, a `*`
is one name):

    column [heads=8] [parts=2] [gather]   a matrix is cut by what it puts out
    row [heads=8] [unsummed]              ... by what it takes in; what ranks put out is added up,
                                          unless it is left so
    experts [parts=2]                     transformers' stacked matrices of experts, up (parts=2:
                                          gate and up) and down, are cut by the features between;
                                          what ranks put out is added up
    vocab                                 an embedding, or a head, is cut by tokens
    region [argument] [summed] [divide=a,b]  between here and the rows inside, ranks work on parts
                                          of the same tokens; summed: what comes out are parts of a
                                          sum, and is added up here
    sequence                              of what it puts out, a rank keeps its part of the sequence
    partial [divide=a,b]                  its parameters see a part on each rank: their gradients
                                          are added up
    replicate [divide=a,b]                whole on every rank

`heads=8` cuts between heads. `heads=8+2/8+2/8` is a fused matrix: 8 query heads, then 2 key and 2
value heads that serve those 8; where there are more ranks than key heads, several hold the same
one. `parts=2` is a fused matrix without heads (gate and up). `divide=` names integer attributes of
the module that count heads or features, to be one rank's; `divide=size/2` one that counts the
features of 2 heads, `divide=core.heads` one of a module inside.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from phalanx.core.errors import LayoutError, format_nearest_word_hint
from phalanx.core.units import plural

RuleKind = Literal[
    "column", "row", "experts", "vocab", "region", "sequence", "partial", "replicate"
]
RULE_KINDS: tuple[str, ...] = get_args(RuleKind)
CUTTING_KINDS = ("column", "row", "experts", "vocab")
_FLAG_OPTIONS = ("gather", "summed", "unsummed")
_OPTIONS_OF_KIND = {
    "column": ("heads", "parts", "gather"),
    "row": ("heads", "unsummed"),
    "experts": ("parts",),
    "region": ("divide", "summed"),
    "partial": ("divide",),
    "replicate": ("divide",),
}


class TensorDegreeError(LayoutError):
    """A degree of tp that a layer cannot be cut by, whose rule is right."""


@dataclass(frozen=True)
class FusedPart:
    """One of the matrices that a fused one holds.

    `heads` serve `queries` query heads; 0 heads: plain features.
    """

    heads: int = 0
    queries: int = 0


@dataclass(frozen=True)
class DimSlice:
    """The part of a dimension that one rank holds: elements [start, start + size) of the whole.

    `copies` ranks hold them alike, and this is number `copy` of those.
    """

    start: int
    size: int
    copy: int = 0
    copies: int = 1


@dataclass(frozen=True)
class CountAttribute:
    """An integer attribute of a module, which counts heads, or features: those of `heads` heads,
    if that is not 0."""

    attribute: str
    heads: int = 0

    def divide_by_tp(self, value: int, tp: int) -> int | None:
        """The value of the attribute on one rank; None if tp does not divide it."""
        heads = self.heads or value
        if value % heads or (heads % tp and tp % heads):
            return None
        return value // heads * max(1, heads // tp)


@dataclass(frozen=True)
class ShardingRule:
    """One rule, read. `text` is what was written."""

    pattern: str
    text: str
    kind: RuleKind
    parts: tuple[FusedPart, ...] = (FusedPart(),)
    gather: bool = False
    divide: tuple[CountAttribute, ...] = ()
    argument: str = ""
    summed: bool = False
    """Of a region: what comes out is added up there."""
    unsummed: bool = False
    """Of a row: what ranks put out is left as it is, for the region around."""

    def list_rank_slices(self, size: int, tp: int, rank: int, *, name: str) -> list[DimSlice]:
        """The parts of a dimension of `size` that `rank` of `tp` holds.

        Raises LayoutError where it cannot be cut.
        """
        spans, start = [], 0
        heads = sum(part.heads for part in self.parts)
        if size % (heads or len(self.parts)):
            divisor = f"{heads} heads" if heads else f"{len(self.parts)} parts"
            raise LayoutError(
                f"{name} has {size} features, which are not {divisor}", where=self._format_location
            )
        unit = size // (heads or len(self.parts))
        for part in self.parts:
            if part.heads:
                span = _compute_head_slice(part, unit, tp, rank, name)
            else:
                span = _compute_feature_slice(unit, tp, rank, name)
            spans.append(DimSlice(start + span.start, span.size, span.copy, span.copies))
            start += unit * (part.heads or 1)
        return spans

    @property
    def _format_location(self) -> str:
        return f'sharding rule "{self.pattern}" = "{self.text}"'


def _compute_head_slice(part: FusedPart, unit: int, tp: int, rank: int, name: str) -> DimSlice:
    if part.heads % tp == 0:
        num_heads = part.heads // tp
        return DimSlice(rank * num_heads * unit, num_heads * unit)
    if part.heads < part.queries and part.queries % tp == 0 and tp % part.heads == 0:
        # More ranks than key heads: neighbours hold the same one, which serves their queries.
        copies = tp // part.heads
        return DimSlice(rank // copies * unit, unit, rank % copies, copies)
    degrees = list_legal_tp_degrees(part.queries or part.heads, part.heads)
    raise TensorDegreeError(
        f"tp {tp} does not divide the {part.heads} heads of {name}",
        fix=f"nearest: {_format_nearest_degrees(tp, degrees)}",
    )


def _compute_feature_slice(width: int, tp: int, rank: int, name: str) -> DimSlice:
    """The part of `width` features that one rank holds. No two ranks differ by more than one
    feature."""
    if width < tp:
        raise TensorDegreeError(f"{name} has {width} features, too few for tp {tp}")
    # Both ends are rounded down, so that parts meet and differ by one feature at most.
    start = width * rank // tp
    return DimSlice(start, width * (rank + 1) // tp - start)


def list_legal_tp_degrees(num_heads: int, num_kv_heads: int) -> list[int]:
    """The degrees of tp that attention with so many heads can have, in ascending order."""
    degrees = [tp for tp in range(1, num_heads + 1) if num_heads % tp == 0]
    return [tp for tp in degrees if num_kv_heads % tp == 0 or tp % num_kv_heads == 0]


def describe_heads(num_heads: int, num_kv_heads: int) -> str:
    """The heads of attention, for messages: '4 heads with 2 key-value heads'."""
    return f"{plural(num_heads, 'head')} with {plural(num_kv_heads, 'key-value head')}"


def _format_nearest_degrees(degree: int, legal: list[int]) -> str:
    below, above = [d for d in legal if d < degree][-1:], [d for d in legal if d > degree][:1]
    return " or ".join(map(str, below + above))


def parse_sharding_rules(texts: Mapping[str, str]) -> tuple[ShardingRule, ...]:
    """Rules in the order they are written. Raises LayoutError for one that cannot be read."""
    return tuple(_parse_rule(pattern, text) for pattern, text in texts.items())


def _parse_rule(pattern: str, text: str) -> ShardingRule:
    where = f'sharding rule "{pattern}" = "{text}"'
    words = text.split()
    if not words or words[0] not in RULE_KINDS:
        raise LayoutError(
            f"{words[0]!r} is no kind of rule" if words else "it is empty",
            where=where,
            fix=(format_nearest_word_hint(words[0], RULE_KINDS) if words else "")
            or f"one of {', '.join(RULE_KINDS)}",
        )
    kind: RuleKind = words[0]  # type: ignore[assignment]
    values: dict[str, str] = {}
    for word in words[1:]:
        key, _, value = word.partition("=")
        if kind == "region" and "=" not in word and word not in _FLAG_OPTIONS:
            values["argument"] = word
            continue
        if key not in _OPTIONS_OF_KIND.get(kind, ()) or (key in _FLAG_OPTIONS) == bool(value):
            known = ", ".join(_OPTIONS_OF_KIND.get(kind, ())) or "nothing"
            raise LayoutError(
                f"{word!r} says nothing of a {kind}", where=where, fix=f"it takes {known}"
            )
        values[key] = value
    try:
        parts, divide = (
            _parse_fused_parts(values),
            _parse_count_attributes(values.get("divide", "")),
        )
    except ValueError:
        raise LayoutError(
            "its numbers cannot be read",
            where=where,
            fix="as heads=8, heads=8+2/8+2/8, parts=2, divide=num_heads,size/2",
        ) from None
    flags = {flag: flag in values for flag in _FLAG_OPTIONS}
    return ShardingRule(
        pattern, text, kind, parts, divide=divide, argument=values.get("argument", ""), **flags
    )


def _parse_fused_parts(values: Mapping[str, str]) -> tuple[FusedPart, ...]:
    if "heads" in values:
        parts = []
        for word in values["heads"].split("+"):
            heads, _, queries = word.partition("/")
            parts.append(FusedPart(int(heads), int(queries or heads)))
        if min(min(part.heads, part.queries) for part in parts) < 1:
            raise ValueError(values["heads"])
        return tuple(parts)
    count = int(values.get("parts", "1"))
    if count < 1:
        raise ValueError(count)
    return (FusedPart(),) * count


def _parse_count_attributes(text: str) -> tuple[CountAttribute, ...]:
    counts = []
    for word in filter(None, text.split(",")):
        attribute, slash, heads = word.partition("/")
        if slash and int(heads) < 1:
            raise ValueError(word)
        counts.append(CountAttribute(attribute, int(heads or 0)))
    return tuple(counts)


def matches_pattern(pattern: str, name: str) -> bool:
    """True if `pattern` matches `name`. A `*` stands for one part of a dotted name, or a piece of
    it."""
    # fnmatch's * crosses dots, so the dots are counted first.
    return pattern.count(".") == name.count(".") and fnmatch.fnmatchcase(name, pattern)


def find_matching_rule(rules: Iterable[ShardingRule], name: str) -> ShardingRule | None:
    """The first rule that matches a module's name; None if none does."""
    return next((rule for rule in rules if matches_pattern(rule.pattern, name)), None)
