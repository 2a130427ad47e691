"""What sharding rules cut of a user's own module, and what they leave whole: found before a rank
starts.

Torch-free.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from phalanx.core.errors import LayoutError, did_you_mean
from phalanx.core.units import format_count
from phalanx.job.shape import Holder, Measured, ModelShape
from phalanx.job.tensors import holders_of, module_names
from phalanx.plan.rules import CUTS, Rule, matches, parse_rules, rule_of, rules_of

NUM_NAMED = 3
CUTTABLE = {
    "vocab": (("linear", "embedding"), "embeddings and linear layers"),
    "experts": (("stacked", "stacked with gates"), "experts whose matrices are stacked"),
}
SHARE_WORTH_A_WORD = 0.01  # of all parameters


def check_rules(own: Mapping[str, str], shape: ModelShape, tp: int) -> tuple[Rule, ...]:
    """The job's rules, then the model's own.

    Raises LayoutError for what cannot be: text, names, kinds of modules, degrees. With one rank
    only the text is looked at.
    """
    rules = parse_rules(own)
    if tp > 1 and shape.is_known:
        return _check_built_in(rules, shape, tp)
    if shape.measured is None or tp == 1 or not shape.measured.names:
        return rules
    brought = {pattern: text for pattern, text in shape.measured.shard_rules if pattern not in own}
    rules += parse_rules(brought)
    require_matches(rules, shape.measured.names)
    if not any(rule.kind in CUTS for rule in rules):
        raise no_rules(shape.kind)
    for holder in shape.measured.holders:
        rule = rule_of(rules, holder.name)
        if rule is not None and rule.kind in CUTS:
            _check(rule, holder, tp)
    _require_rows(rules, shape.measured.holders)
    return rules


def _require_rows(rules: Sequence[Rule], holders: Sequence[Holder]) -> None:
    """Raises LayoutError for columns where nothing takes parts of features: no row anywhere, and
    no sum."""
    cut = [rule for holder in holders if (rule := rule_of(rules, holder.name)) is not None]
    column = next((rule for rule in cut if rule.kind == "column" and not rule.gather), None)
    takes_parts = any(rule.kind == "row" for rule in cut) or any(rule.summed for rule in rules)
    if column is not None and not takes_parts:
        raise no_row(column, "no row takes them")


def no_row(column: Rule, what: str) -> LayoutError:
    return LayoutError(
        f"a rank has a part of the features that it puts out, and {what}",
        where=f'sharding rule "{column.pattern}" = "{column.text}"',
        fix='give the layer that takes them "row", or put them together with "column gather"',
    )


def _check_built_in(own: tuple[Rule, ...], shape: ModelShape, tp: int) -> tuple[Rule, ...]:
    """Its own rules are right: only the job's are looked at."""
    replaced = {rule.pattern for rule in own}
    rules = own + parse_rules({p: text for p, text in rules_of(shape).items() if p not in replaced})
    if not own:
        return rules
    require_matches(own, module_names(shape))
    if not any(rule.kind in CUTS for rule in rules):
        raise no_rules(f"a {shape.kind} with these rules")
    for holder in holders_of(shape).values():
        rule = rule_of(own, holder.name)
        if rule is not None and rule.kind in CUTS:
            _check(rule, holder, tp)
    return rules


def no_rules(what: str) -> LayoutError:
    return LayoutError(
        f"{what} has no sharding rules, and tp cannot cut it",
        fix="phalanx plan --suggest-rules proposes some for [parallel.rules], or set parallel.tp=1",
    )


def require_matches(rules: Iterable[Rule], names: Sequence[str]) -> None:
    """Raises LayoutError for a rule that is for no module."""
    for rule in rules:
        if not any(matches(rule.pattern, name) for name in names):
            near = did_you_mean(rule.pattern, sorted({pattern_of(name) for name in names if name}))
            known = list(dict.fromkeys(pattern_of(name) for name in names if name))[:5]
            raise LayoutError(
                "no module of the model is named so",
                where=f'sharding rule "{rule.pattern}" = "{rule.text}"',
                fix=near or f"its modules are {', '.join(known)} ...",
            )


def require_cuttable(rule: Rule, name: str, kind: str) -> None:
    """Raises LayoutError for a cut of what is no linear layer. `kind` is one of `Holder`."""
    where = f'sharding rule "{rule.pattern}" = "{rule.text}"'
    if kind == "attention":
        raise LayoutError(
            f"{name} belongs to an nn.MultiheadAttention, which multiplies by its matrices itself",
            where=where,
            fix=(
                "leave it out, and it stays whole on every rank; or write it with nn.Linear for q,"
                " k, v and o"
            ),
        )
    kinds, wanted = CUTTABLE.get(rule.kind, (("linear", "grouped"), "linear layers"))
    if kind not in kinds:
        raise LayoutError(
            f"{name} is {'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}, and {rule.kind} cuts"
            f" {wanted}",
            where=where,
            fix="leave it out, and it stays whole on every rank",
        )


def require_parts(rule: Rule, name: str, kind: str) -> None:
    """Raises LayoutError for experts whose first matrices hold other parts than the rule says."""
    wanted = 2 if kind == "stacked with gates" else 1
    if rule.kind == "experts" and len(rule.parts) != wanted:
        raise LayoutError(
            f"the first matrices of {name} are"
            f" {'gate and up in one' if wanted == 2 else 'up alone'}",
            where=f'sharding rule "{rule.pattern}" = "{rule.text}"',
            fix=f'write "{"experts parts=2" if wanted == 2 else "experts"}"',
        )


def _check(rule: Rule, holder: Holder, tp: int) -> None:
    require_cuttable(rule, holder.name, holder.kind)
    require_parts(rule, holder.name, holder.kind)
    size = holder.num_inputs if rule.kind == "row" else holder.num_outputs
    rule.spans(size, tp, 0, name=holder.name)


@lru_cache(maxsize=4)
def measured_of_one_rank(measured: Measured, rules: tuple[Rule, ...], tp: int) -> Measured:
    """What `rules` leave of a user's own module on one rank.

    Widths that do not divide: of the rank that has most.
    """
    holders = tuple(
        _of_one_rank(holder, rule_of(rules, holder.name), tp) for holder in measured.holders
    )
    saved: dict[str, int] = defaultdict(int)  # by module, of all that is inside
    for whole, own in zip(measured.holders, holders, strict=True):
        parts = whole.name.split(".")
        for count in range(len(parts) + 1):
            saved[".".join(parts[:count])] += whole.num_params - own.num_params
    blocks = tuple((block, size - saved[block]) for block, size in measured.blocks)
    num_params, sizes = measured.num_params - saved[""], [size for _, size in blocks]
    return replace(
        measured,
        num_params=num_params,
        block_params=max(sizes, default=num_params),
        blocks_params=sum(sizes),
        holders=holders,
        blocks=blocks,
    )


def _of_one_rank(holder: Holder, rule: Rule | None, tp: int) -> Holder:
    """A column, or a vocabulary, has a part of its bias, too; a row all of it.

    A tied weight counts elsewhere.
    """
    if rule is None or rule.kind not in CUTS or not holder.num_outputs:
        return holder
    whole = holder.num_inputs if rule.kind == "row" else holder.num_outputs
    own = max(
        sum(span.size for span in rule.spans(whole, tp, rank, name=holder.name))
        for rank in range(tp)
    )
    if rule.kind != "row":
        return replace(holder, num_params=holder.num_params // whole * own, num_outputs=own)
    bias = holder.num_params % (holder.num_outputs * holder.num_inputs)
    return replace(
        holder, num_params=(holder.num_params - bias) // whole * own + bias, num_inputs=own
    )


def whole_by_default(rules: Sequence[Rule], shape: ModelShape) -> str:
    """A line about matrices that no rule names, which stay whole on every rank; nothing, if
    there are none to name."""
    if shape.measured is None:
        return ""
    sizes: dict[str, list[int]] = defaultdict(list)
    for holder in shape.measured.holders:
        is_matrix = (
            holder.num_params > holder.num_outputs + holder.num_inputs or holder.kind == "linear"
        )
        if is_matrix and rule_of(rules, holder.name) is None:
            sizes[pattern_of(holder.name)].append(holder.num_params)
    total = max(1, shape.num_params)
    named = sorted(sizes.items(), key=lambda item: -sum(item[1]))
    named = [(name, s) for name, s in named if sum(s) >= SHARE_WORTH_A_WORD * total]
    if not named:
        return ""
    words = ", ".join(
        f"`{name}`{f' ({len(s)} of them)' if len(s) > 1 else ''}, {format_count(sum(s))} parameters"
        for name, s in named[:NUM_NAMED]
    )
    more = f" and {len(named) - NUM_NAMED} more" if len(named) > NUM_NAMED else ""
    return f"tp: no rule covers {words}{more}; they stay whole on every rank"


def pattern_of(name: str) -> str:
    """blocks.3.ffn.up -> blocks.*.ffn.up."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)
