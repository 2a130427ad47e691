"""Checks of sharding rules before a rank starts: what they cut of a model, whether that can be,
whether it fits together, and what they leave whole.

Torch-free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from phalanx.core.errors import LayoutError, format_nearest_word_hint
from phalanx.core.units import format_count
from phalanx.job.costs import ModelCosts
from phalanx.job.param_holder import ParamHolder
from phalanx.job.shapes.own_rules import build_pattern_for_all_blocks
from phalanx.plan.rules import (
    CUTTING_KINDS,
    DimSlice,
    ShardingRule,
    TensorDegreeError,
    find_matching_rule,
    matches_pattern,
    parse_sharding_rules,
)

MAX_NAMED_MODULES = 3
CUTTABLE_LAYER_KINDS = {
    "vocab": (("linear", "embedding"), "embeddings and linear layers"),
    "experts": (("stacked", "stacked with gates"), "experts whose matrices are stacked"),
}
MIN_REMARKED_SHARE = 0.01  # of all parameters


def combine_and_check_rules(
    overrides: Mapping[str, str], shape: ModelCosts, tp: int
) -> tuple[ShardingRule, ...]:
    """The job's rules, then the model's own.

    Raises LayoutError for what cannot be: text, names, kinds of modules, degrees. Rules that are
    proven are not looked at again; with one rank only the text is.
    """
    of_job = parse_sharding_rules(overrides)
    if tp == 1:
        return of_job
    # The job's come first, where `find_matching_rule` looks first; of one pattern only the job's
    # text stays.
    brought = {pattern: text for pattern, text in shape.shard_rules if pattern not in overrides}
    rules = of_job + parse_sharding_rules(brought)
    unproven, name = rules, shape.kind
    if shape.has_proven_rules:
        if not of_job:
            return rules
        unproven, name = of_job, f"a {shape.kind} with these rules"
    if not shape.module_names:  # of a probe that says none
        return of_job
    require_rule_matches_module(unproven, shape.module_names)
    if not any(rule.kind in CUTTING_KINDS for rule in rules):
        raise missing_rules_error(name)
    for holder in shape.holders:
        rule = find_matching_rule(unproven, holder.name)
        if rule is not None and rule.kind in CUTTING_KINDS:
            _require_rule_fits_layer(rule, holder, tp)
    if not shape.has_proven_rules:
        _require_row_rules(rules, shape.holders)
    return rules


def can_be_cut_by(rules_of_job: Mapping[str, str], shape: ModelCosts, tp: int) -> bool:
    """False where layers cannot be cut by `tp`, or no rule cuts any. Raises LayoutError for rules
    that are wrong at any degree."""
    if not rules_of_job and not shape.has_proven_rules and not shape.shard_rules:
        return False
    try:
        combine_and_check_rules(rules_of_job, shape, tp)
    except TensorDegreeError:
        return False
    return True


def _require_row_rules(rules: Sequence[ShardingRule], holders: Sequence[ParamHolder]) -> None:
    """Raises LayoutError for columns where nothing takes parts of features: no row anywhere, and
    no sum."""
    column, takes_parts = None, any(rule.summed for rule in rules)
    for holder in holders:
        rule = find_matching_rule(rules, holder.name)
        if rule is None:
            continue
        if rule.kind == "column" and not rule.gather:
            column = column or rule
        takes_parts = takes_parts or rule.kind == "row"
    if column is not None and not takes_parts:
        raise missing_row_rule_error(column, "no row takes them")


def missing_row_rule_error(column: ShardingRule, problem: str) -> LayoutError:
    return LayoutError(
        f"a rank has a part of the features that it puts out, and {problem}",
        where=f'sharding rule "{column.pattern}" = "{column.text}"',
        fix='give the layer that takes them "row", or put them together with "column gather"',
    )


def missing_rules_error(model: str) -> LayoutError:
    return LayoutError(
        f"{model} has no sharding rules, and tp cannot cut it",
        fix="phalanx plan --suggest-rules proposes some for [parallel.rules], or set parallel.tp=1",
    )


def require_rule_matches_module(rules: Iterable[ShardingRule], names: Sequence[str]) -> None:
    """Raises LayoutError for a rule that is for no module."""
    for rule in rules:
        if not any(matches_pattern(rule.pattern, name) for name in names):
            suggestion = format_nearest_word_hint(
                rule.pattern, sorted({build_pattern_for_all_blocks(name) for name in names if name})
            )
            known = list(
                dict.fromkeys(build_pattern_for_all_blocks(name) for name in names if name)
            )[:5]
            raise LayoutError(
                "no module of the model is named so",
                where=f'sharding rule "{rule.pattern}" = "{rule.text}"',
                fix=suggestion or f"its modules are {', '.join(known)} ...",
            )


def require_cuttable_layer(rule: ShardingRule, name: str, kind: str) -> None:
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
    kinds, layers = CUTTABLE_LAYER_KINDS.get(rule.kind, (("linear", "grouped"), "linear layers"))
    if kind not in kinds:
        raise LayoutError(
            f"{name} is {'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}, and {rule.kind} cuts"
            f" {layers}",
            where=where,
            fix="leave it out, and it stays whole on every rank",
        )


def require_fused_expert_parts(rule: ShardingRule, name: str, kind: str) -> None:
    """Raises LayoutError for experts whose first matrices hold other parts than the rule says."""
    num_parts, contents, text = 1, "up alone", "experts"
    if kind == "stacked with gates":
        num_parts, contents, text = 2, "gate and up in one", "experts parts=2"
    if rule.kind == "experts" and len(rule.parts) != num_parts:
        raise LayoutError(
            f"the first matrices of {name} are {contents}",
            where=f'sharding rule "{rule.pattern}" = "{rule.text}"',
            fix=f'write "{text}"',
        )


def _require_rule_fits_layer(rule: ShardingRule, holder: ParamHolder, tp: int) -> None:
    require_cuttable_layer(rule, holder.name, holder.kind)
    require_fused_expert_parts(rule, holder.name, holder.kind)
    size = holder.num_outputs
    if rule.kind == "row":
        size = holder.num_inputs
    rule.list_rank_slices(size, tp, 0, name=holder.name)


def describe_unsharded_matrices(rules: Sequence[ShardingRule], shape: ModelCosts) -> str:
    """A line about matrices that no rule names, which stay whole on every rank; "" if there are
    none to name."""
    if shape.has_proven_rules:
        return ""
    sizes: dict[str, list[int]] = defaultdict(list)
    for holder in shape.holders:
        if _is_matrix(holder) and find_matching_rule(rules, holder.name) is None:
            sizes[build_pattern_for_all_blocks(holder.name)].append(holder.num_params)
    words = []
    # The largest first: only MAX_NAMED_MODULES of them are told.
    for name, each in sorted(sizes.items(), key=lambda item: -sum(item[1])):
        if sum(each) < MIN_REMARKED_SHARE * max(1, shape.num_params):
            continue
        number = f" ({len(each)} of them)" * (len(each) > 1)
        words.append(f"`{name}`{number}, {format_count(sum(each))} parameters")
    if not words:
        return ""
    line = f"tp: no rule covers {', '.join(words[:MAX_NAMED_MODULES])}"
    if len(words) > MAX_NAMED_MODULES:
        line += f" and {len(words) - MAX_NAMED_MODULES} more"
    return f"{line}; they stay whole on every rank"


def describe_few_cut_matrices(rules: Sequence[ShardingRule], shape: ModelCosts) -> str:
    """How many matrices the rules cut, in words, where they leave most of them whole; else ""."""
    matrices = [
        holder
        for holder in shape.holders
        # Norms have vectors alone, of as many numbers as a small convolution.
        if _is_matrix(holder) and "norm" not in holder.kind.lower()
    ]
    num_cut = 0
    for matrix in matrices:
        rule = find_matching_rule(rules, matrix.name)
        if rule is not None and rule.kind in CUTTING_KINDS:
            num_cut += 1
    if 2 * num_cut >= len(matrices):
        return ""
    return f"{num_cut} of {len(matrices)} matrices cut"


def _is_matrix(holder: ParamHolder) -> bool:
    return holder.num_params > holder.num_outputs + holder.num_inputs or holder.kind == "linear"


PARTS_CUT_TOGETHER = {
    "attention": ("q", "q_up", "k", "v", "kv_up", "o"),
    "ffn": ("gate", "up", "down"),
}


def require_consistent_rules(
    rules: Sequence[ShardingRule], shape: ModelCosts, tp: int, *, cuts_sequence: bool
) -> None:
    """Raises LayoutError for rules (the job's, then the model's) that each can be and together
    cannot."""
    holders = {holder.name: holder for holder in shape.holders}
    # Block by block: a pattern may name a single one.
    for layer in range(shape.num_layers):
        for part, members in PARTS_CUT_TOGETHER.items():
            region = f"blocks.{layer}.{part}"
            names = [f"{region}.{member}" for member in members]
            together = [holders[name] for name in names if name in holders]
            if not together:
                continue
            cuts = _find_cuts_by_module(rules, together, tp)
            _require_equal_cuts(rules, region, cuts, together, shape, cuts_sequence=cuts_sequence)
            inside = [name for name in holders if name.startswith(f"{region}.")]
            uncut = [name for name in inside if name not in names]
            _require_gradient_sums(rules, region, uncut, is_cut=any(cuts.values()))
    if "embed" in holders:
        _require_embedding_and_head_rules(rules, holders, cuts_sequence=cuts_sequence)
    else:
        _require_unsharded_classes(find_matching_rule(rules, "head"))


def _require_equal_cuts(
    rules: Sequence[ShardingRule],
    region: str,
    cuts: dict[str, Cuts],
    holders: Sequence[ParamHolder],
    shape: ModelCosts,
    *,
    cuts_sequence: bool,
) -> None:
    """Raises LayoutError unless all that works on the same heads or features is cut alike, or stays
    whole on every rank."""
    words = ", ".join(name.rpartition(".")[2] for name in cuts)
    fix = f"leave the rules of {words} to the model, or give all of them, and {region}, replicate"
    if not any(cuts.values()):
        rule = find_matching_rule(rules, region)
        if rule is not None and rule.kind == "region":
            raise LayoutError(
                f"{region} is a region, and nothing of it is cut", where=_format_rule(rule), fix=fix
            )
        if cuts_sequence and region.endswith("attention"):
            problem = f"{region} would stay whole, and see a part of the sequence"
            raise LayoutError(
                problem, fix="set parallel.sequence_parallel=false, or leave its rules to the model"
            )
        return
    first = next(cut for cut in cuts.values() if cut)
    expected = dict.fromkeys(cuts, first)
    if region.endswith("attention"):  # its parts have other numbers of heads
        # What is cut has spans for every rank, so their number is tp.
        of_model = parse_sharding_rules(dict(shape.shard_rules))
        expected = _find_cuts_by_module(of_model, holders, tp=len(first))
    for name, cut in cuts.items():
        if cut != expected[name]:
            raise LayoutError(
                f"{name} would not be cut as what it works with is",
                where=_format_rule(find_matching_rule(rules, name)),
                fix=fix,
            )


def _require_gradient_sums(
    rules: Sequence[ShardingRule], region: str, names: Sequence[str], *, is_cut: bool
) -> None:
    """Raises LayoutError where gradients of modules between cut ones (norms of heads, latents) are
    not summed over ranks, or are summed although nothing around them is cut."""
    for name in names:
        rule = find_matching_rule(rules, name)
        if rule is None or (rule.kind == "partial") == is_cut:
            continue
        part, sums, fix = "a part", "not added up", "partial"
        if not is_cut:
            part, sums = "all", "added up"
            fix = f"leave its rule to the model, or give all of {region}, and this, replicate"
        raise LayoutError(
            f"{name} sees {part} of {region} on each rank, and its gradient is {sums}",
            where=_format_rule(rule),
            fix=fix,
        )


Cuts = tuple[tuple[DimSlice, ...], ...]  # of each rank


def _find_cuts_by_module(
    rules: Sequence[ShardingRule], holders: Sequence[ParamHolder], tp: int
) -> dict[str, Cuts]:
    return {
        holder.name: _find_cut_features(find_matching_rule(rules, holder.name), holder, tp)
        for holder in holders
    }


def _find_cut_features(rule: ShardingRule | None, holder: ParamHolder, tp: int) -> Cuts:
    """The features that each rank holds of those that are cut; empty if all ranks have all of
    them."""
    kind, size = "column", holder.num_outputs
    if holder.name.rpartition(".")[2] in ("o", "down"):  # the last of its region
        kind, size = "row", holder.num_inputs
    if rule is None or rule.kind != kind or rule.gather:
        return ()
    return tuple(
        tuple(rule.list_rank_slices(size, tp, rank, name=holder.name)) for rank in range(tp)
    )


def _require_embedding_and_head_rules(
    rules: Sequence[ShardingRule], modules: Collection[str], *, cuts_sequence: bool
) -> None:
    """Raises LayoutError for rules of embedding or head that do not go with a cut sequence, or with
    a loss by tokens. `modules`: names of those that hold parameters."""
    head_name = "head" if "head" in modules else "embed"  # a tied one
    head = find_matching_rule(rules, head_name)
    if head is not None and head.kind in CUTTING_KINDS and head.kind != "vocab":
        raise LayoutError(
            "a head is cut by tokens",
            where=_format_rule(head),
            fix="vocab, or replicate: it stays whole",
        )
    if not cuts_sequence:
        return
    ends = [("embed", ("vocab", "sequence"))]
    if "embed_positions" in modules:
        ends.append(("embed_positions", ("vocab", "sequence")))
    for name, legal in [*ends, (head_name, ("vocab",))]:
        rule = find_matching_rule(rules, name)
        if rule is None or rule.kind not in legal:
            raise LayoutError(
                f"{name} needs {' or '.join(legal)}, where the sequence is cut between regions",
                where=_format_rule(rule),
                fix="set parallel.sequence_parallel=false, or leave the rule out",
            )


def _require_unsharded_classes(head: ShardingRule | None) -> None:
    if head is not None and (head.kind == "row" or (head.kind == "column" and not head.gather)):
        problem = "a head over classes needs all features and all classes"
        raise LayoutError(
            problem, where=_format_rule(head), fix='"column gather", or replicate: it stays whole'
        )


def _format_rule(rule: ShardingRule | None) -> str | None:
    if rule is None:
        return None
    return f'sharding rule "{rule.pattern}" = "{rule.text}"'
