"""Checks of sharding rules before a rank starts: what they cut of a model, whether that can be,
whether it fits together, and what they leave whole.

Torch-free.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from phalanx.core.errors import LayoutError, did_you_mean
from phalanx.core.units import format_count
from phalanx.job.shape import ModelShape, ParamHolder
from phalanx.job.tensors import list_holders, module_names
from phalanx.plan.rules import CUTS, Rule, Span, built_in_rules, find_rule, matches, parse_rules

NUM_NAMED = 3
CUTTABLE = {
    "vocab": (("linear", "embedding"), "embeddings and linear layers"),
    "experts": (("stacked", "stacked with gates"), "experts whose matrices are stacked"),
}
SHARE_WORTH_A_WORD = 0.01  # of all parameters


def check_rules(overrides: Mapping[str, str], shape: ModelShape, tp: int) -> tuple[Rule, ...]:
    """The job's rules, then the model's own.

    Raises LayoutError for what cannot be: text, names, kinds of modules, degrees. With one rank
    only the text is looked at.
    """
    rules = parse_rules(overrides)
    if tp > 1 and shape.is_known:
        return _check_built_in(rules, shape, tp)
    if shape.measured is None or tp == 1 or not shape.measured.names:
        return rules
    brought = {
        pattern: text for pattern, text in shape.measured.shard_rules if pattern not in overrides
    }
    rules += parse_rules(brought)
    require_matches(rules, shape.measured.names)
    if not any(rule.kind in CUTS for rule in rules):
        raise missing_rules_error(shape.kind)
    for holder in shape.measured.holders:
        rule = find_rule(rules, holder.name)
        if rule is not None and rule.kind in CUTS:
            _check(rule, holder, tp)
    _require_rows(rules, shape.measured.holders)
    return rules


def _require_rows(rules: Sequence[Rule], holders: Sequence[ParamHolder]) -> None:
    """Raises LayoutError for columns where nothing takes parts of features: no row anywhere, and
    no sum."""
    cut = [rule for holder in holders if (rule := find_rule(rules, holder.name)) is not None]
    column = next((rule for rule in cut if rule.kind == "column" and not rule.gather), None)
    takes_parts = any(rule.kind == "row" for rule in cut) or any(rule.summed for rule in rules)
    if column is not None and not takes_parts:
        raise missing_row_error(column, "no row takes them")


def missing_row_error(column: Rule, problem: str) -> LayoutError:
    return LayoutError(
        f"a rank has a part of the features that it puts out, and {problem}",
        where=f'sharding rule "{column.pattern}" = "{column.text}"',
        fix='give the layer that takes them "row", or put them together with "column gather"',
    )


def _check_built_in(overrides: tuple[Rule, ...], shape: ModelShape, tp: int) -> tuple[Rule, ...]:
    """The job's rules, checked, then those of the built-in model, which are right."""
    replaced = {rule.pattern for rule in overrides}
    rules = overrides + parse_rules(
        {p: text for p, text in built_in_rules(shape).items() if p not in replaced}
    )
    if not overrides:
        return rules
    require_matches(overrides, module_names(shape))
    if not any(rule.kind in CUTS for rule in rules):
        raise missing_rules_error(f"a {shape.kind} with these rules")
    for holder in list_holders(shape).values():
        rule = find_rule(overrides, holder.name)
        if rule is not None and rule.kind in CUTS:
            _check(rule, holder, tp)
    return rules


def missing_rules_error(model: str) -> LayoutError:
    return LayoutError(
        f"{model} has no sharding rules, and tp cannot cut it",
        fix="phalanx plan --suggest-rules proposes some for [parallel.rules], or set parallel.tp=1",
    )


def require_matches(rules: Iterable[Rule], names: Sequence[str]) -> None:
    """Raises LayoutError for a rule that is for no module."""
    for rule in rules:
        if not any(matches(rule.pattern, name) for name in names):
            suggestion = did_you_mean(
                rule.pattern, sorted({pattern_of(name) for name in names if name})
            )
            known = list(dict.fromkeys(pattern_of(name) for name in names if name))[:5]
            raise LayoutError(
                "no module of the model is named so",
                where=f'sharding rule "{rule.pattern}" = "{rule.text}"',
                fix=suggestion or f"its modules are {', '.join(known)} ...",
            )


def require_cuttable(rule: Rule, name: str, kind: str) -> None:
    """Raises LayoutError for a cut of what is no linear layer. `kind` is one of `ParamHolder`."""
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
    kinds, layers = CUTTABLE.get(rule.kind, (("linear", "grouped"), "linear layers"))
    if kind not in kinds:
        raise LayoutError(
            f"{name} is {'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}, and {rule.kind} cuts"
            f" {layers}",
            where=where,
            fix="leave it out, and it stays whole on every rank",
        )


def require_parts(rule: Rule, name: str, kind: str) -> None:
    """Raises LayoutError for experts whose first matrices hold other parts than the rule says."""
    num_parts = 2 if kind == "stacked with gates" else 1
    if rule.kind == "experts" and len(rule.parts) != num_parts:
        raise LayoutError(
            f"the first matrices of {name} are"
            f" {'gate and up in one' if num_parts == 2 else 'up alone'}",
            where=f'sharding rule "{rule.pattern}" = "{rule.text}"',
            fix=f'write "{"experts parts=2" if num_parts == 2 else "experts"}"',
        )


def _check(rule: Rule, holder: ParamHolder, tp: int) -> None:
    require_cuttable(rule, holder.name, holder.kind)
    require_parts(rule, holder.name, holder.kind)
    size = holder.num_inputs if rule.kind == "row" else holder.num_outputs
    rule.spans(size, tp, 0, name=holder.name)


def describe_whole_matrices(rules: Sequence[Rule], shape: ModelShape) -> str:
    """A line about matrices that no rule names, which stay whole on every rank; "" if there are
    none to name."""
    if shape.measured is None:
        return ""
    sizes: dict[str, list[int]] = defaultdict(list)
    for holder in shape.measured.holders:
        is_matrix = (
            holder.num_params > holder.num_outputs + holder.num_inputs or holder.kind == "linear"
        )
        if is_matrix and find_rule(rules, holder.name) is None:
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
    """The pattern that matches a name in every block: blocks.3.ffn.up -> blocks.*.ffn.up."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


TOGETHER = {"attention": ("q", "q_up", "k", "v", "kv_up", "o"), "ffn": ("gate", "up", "down")}


def check_overrides(
    rules: Sequence[Rule], shape: ModelShape, tp: int, *, cuts_sequence: bool
) -> None:
    """Raises LayoutError for rules (the job's, then the model's) that each can be and together
    cannot."""
    holders = list_holders(shape)
    for layer in range(shape.num_layers):
        for part, members in TOGETHER.items():
            region = f"blocks.{layer}.{part}"
            cut_together = [
                holders[name] for name in (f"{region}.{m}" for m in members) if name in holders
            ]
            if cut_together:
                _require_equal_cuts(
                    rules, region, cut_together, shape, tp, cuts_sequence=cuts_sequence
                )
                is_cut = any(
                    _find_cuts(find_rule(rules, holder.name), holder, tp) for holder in cut_together
                )
                uncut = [
                    name
                    for name in holders
                    if name.startswith(f"{region}.") and holders[name] not in cut_together
                ]
                _require_gradient_sums(rules, region, uncut, is_cut=is_cut)
    if shape.reads_images:
        _require_whole_classes(find_rule(rules, "head"))
    else:
        _require_ends(rules, shape, cuts_sequence=cuts_sequence)


def _require_equal_cuts(
    rules: Sequence[Rule],
    region: str,
    holders: Sequence[ParamHolder],
    shape: ModelShape,
    tp: int,
    *,
    cuts_sequence: bool,
) -> None:
    """Raises LayoutError unless all that works on the same heads or features is cut alike, or stays
    whole on every rank."""
    cuts = {
        holder.name: _find_cuts(find_rule(rules, holder.name), holder, tp) for holder in holders
    }
    words = ", ".join(name.rpartition(".")[2] for name in cuts)
    fix = f"leave the rules of {words} to the model, or give all of them, and {region}, replicate"
    if not any(cuts.values()):
        rule = find_rule(rules, region)
        if rule is not None and rule.kind == "region":
            raise LayoutError(
                f"{region} is a region, and nothing of it is cut", where=_name_rule(rule), fix=fix
            )
        if cuts_sequence and region.endswith("attention"):
            problem = f"{region} would stay whole, and see a part of the sequence"
            raise LayoutError(
                problem, fix="set parallel.sequence_parallel=false, or leave its rules to the model"
            )
        return
    expected = (
        _find_model_cuts(shape, holders, tp)
        if region.endswith("attention")
        else dict.fromkeys(cuts, _first_of_cuts(cuts))
    )
    wrong = next((name for name, cut in cuts.items() if cut != expected[name]), None)
    if wrong is not None:
        rule = find_rule(rules, wrong)
        where = _name_rule(rule) if rule is not None else None
        raise LayoutError(
            f"{wrong} would not be cut as what it works with is", where=where, fix=fix
        )


def _require_gradient_sums(
    rules: Sequence[Rule], region: str, names: Sequence[str], *, is_cut: bool
) -> None:
    """Raises LayoutError where gradients of modules between cut ones (norms of heads, latents) are
    not summed over ranks, or are summed although nothing around them is cut."""
    for name in names:
        rule = find_rule(rules, name)
        if rule is None or (rule.kind == "partial") == is_cut:
            continue
        problem = (
            f"{name} sees {'a part' if is_cut else 'all'} of {region} on each rank, and its"
            " gradient is"
        )
        problem += f" {'not added up' if is_cut else 'added up'}"
        fix = f"leave its rule to the model, or give all of {region}, and this, replicate"
        raise LayoutError(problem, where=_name_rule(rule), fix="partial" if is_cut else fix)


def _find_model_cuts(shape: ModelShape, holders: Sequence[ParamHolder], tp: int) -> dict[str, Cuts]:
    rules = parse_rules(built_in_rules(shape))
    return {
        holder.name: _find_cuts(find_rule(rules, holder.name), holder, tp) for holder in holders
    }


Cuts = tuple[tuple[Span, ...], ...]


def _first_of_cuts(cuts: Mapping[str, Cuts]) -> Cuts:
    return next(cut for cut in cuts.values() if cut)


def _find_cuts(rule: Rule | None, holder: ParamHolder, tp: int) -> Cuts:
    """The features that each rank holds of those that are cut; empty if all ranks have all of
    them."""
    is_last = holder.name.rpartition(".")[2] in ("o", "down")
    if rule is None or rule.kind != ("row" if is_last else "column") or rule.gather:
        return ()
    size = holder.num_inputs if is_last else holder.num_outputs
    return tuple(tuple(rule.spans(size, tp, rank, name=holder.name)) for rank in range(tp))


def _require_ends(rules: Sequence[Rule], shape: ModelShape, *, cuts_sequence: bool) -> None:
    """Raises LayoutError for rules of embedding or head that do not go with a cut sequence, or with
    a loss by tokens."""
    first, head = (
        find_rule(rules, "embed"),
        find_rule(rules, "embed" if shape.tie_embeddings else "head"),
    )
    if head is not None and head.kind in CUTS and head.kind != "vocab":
        raise LayoutError(
            "a head is cut by tokens",
            where=_name_rule(head),
            fix="vocab, or replicate: it stays whole",
        )
    if not cuts_sequence:
        return
    for name, rule, legal in (
        ("embed", first, ("vocab", "sequence")),
        *(
            (("embed_positions", find_rule(rules, "embed_positions"), ("vocab", "sequence")),)
            * (shape.positions == "learned")
        ),
        ("embed" if shape.tie_embeddings else "head", head, ("vocab",)),
    ):
        if rule is None or rule.kind not in legal:
            raise LayoutError(
                f"{name} needs {' or '.join(legal)}, where the sequence is cut between regions",
                where=None if rule is None else _name_rule(rule),
                fix="set parallel.sequence_parallel=false, or leave the rule out",
            )


def _require_whole_classes(head: Rule | None) -> None:
    if head is not None and (head.kind == "row" or (head.kind == "column" and not head.gather)):
        problem = "a head over classes needs all features and all classes"
        raise LayoutError(
            problem, where=_name_rule(head), fix='"column gather", or replicate: it stays whole'
        )


def _name_rule(rule: Rule) -> str:
    return f'sharding rule "{rule.pattern}" = "{rule.text}"'
