"""A job's sharding rules for a built-in model: whether what they cut, beside what the model's
own do, fits together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.core.errors import LayoutError
from phalanx.job.shape import Holder, ModelShape
from phalanx.job.tensors import holders_of
from phalanx.plan.rules import CUTS, Rule, Span, parse_rules, rule_of, rules_of

TOGETHER = {"attention": ("q", "q_up", "k", "v", "kv_up", "o"), "ffn": ("gate", "up", "down")}


def require_fitting(
    rules: Sequence[Rule], shape: ModelShape, tp: int, *, cuts_sequence: bool
) -> None:
    """Raises LayoutError for rules (the job's, then the model's) that each can be and together
    cannot."""
    holders = holders_of(shape)
    for layer in range(shape.num_layers):
        for part, members in TOGETHER.items():
            region = f"blocks.{layer}.{part}"
            found = [
                holders[name] for name in (f"{region}.{m}" for m in members) if name in holders
            ]
            if found:
                _require_one_cut(rules, region, found, shape, tp, cuts_sequence=cuts_sequence)
                is_cut = any(_cut_by(rule_of(rules, holder.name), holder, tp) for holder in found)
                others = [
                    name
                    for name in holders
                    if name.startswith(f"{region}.") and holders[name] not in found
                ]
                _require_summed(rules, region, others, is_cut=is_cut)
    if shape.reads_images:
        _require_whole_classes(rule_of(rules, "head"))
    else:
        _require_ends(rules, shape, cuts_sequence=cuts_sequence)


def _require_one_cut(
    rules: Sequence[Rule],
    region: str,
    found: Sequence[Holder],
    shape: ModelShape,
    tp: int,
    *,
    cuts_sequence: bool,
) -> None:
    """What works on the same heads or features is cut alike or stays whole on every rank."""
    made = {holder.name: _cut_by(rule_of(rules, holder.name), holder, tp) for holder in found}
    words = ", ".join(name.rpartition(".")[2] for name in made)
    fix = f"leave the rules of {words} to the model, or give all of them, and {region}, replicate"
    if not any(made.values()):
        rule = rule_of(rules, region)
        if rule is not None and rule.kind == "region":
            raise LayoutError(
                f"{region} is a region, and nothing of it is cut", where=_where(rule), fix=fix
            )
        if cuts_sequence and region.endswith("attention"):
            what = f"{region} would stay whole, and see a part of the sequence"
            raise LayoutError(
                what, fix="set parallel.sequence_parallel=false, or leave its rules to the model"
            )
        return
    wanted = (
        _own_cuts(shape, found, tp)
        if region.endswith("attention")
        else dict.fromkeys(made, _first(made))
    )
    wrong = next((name for name, cut in made.items() if cut != wanted[name]), None)
    if wrong is not None:
        rule = rule_of(rules, wrong)
        where = _where(rule) if rule is not None else None
        raise LayoutError(
            f"{wrong} would not be cut as what it works with is", where=where, fix=fix
        )


def _require_summed(
    rules: Sequence[Rule], region: str, others: Sequence[str], *, is_cut: bool
) -> None:
    """What is whole among what is cut (norms of heads, latents) sees a part on each rank; among
    what is whole, all."""
    for name in others:
        rule = rule_of(rules, name)
        if rule is None or (rule.kind == "partial") == is_cut:
            continue
        what = (
            f"{name} sees {'a part' if is_cut else 'all'} of {region} on each rank, and its"
            " gradient is"
        )
        what += f" {'not added up' if is_cut else 'added up'}"
        fix = f"leave its rule to the model, or give all of {region}, and this, replicate"
        raise LayoutError(what, where=_where(rule), fix="partial" if is_cut else fix)


def _own_cuts(shape: ModelShape, found: Sequence[Holder], tp: int) -> dict[str, Cuts]:
    own = parse_rules(rules_of(shape))
    return {holder.name: _cut_by(rule_of(own, holder.name), holder, tp) for holder in found}


Cuts = tuple[tuple[Span, ...], ...]


def _first(made: Mapping[str, Cuts]) -> Cuts:
    return next(cut for cut in made.values() if cut)


def _cut_by(rule: Rule | None, holder: Holder, tp: int) -> Cuts:
    """What each rank holds of the features that are cut; nothing, where all ranks have them all."""
    is_last = holder.name.rpartition(".")[2] in ("o", "down")
    if rule is None or rule.kind != ("row" if is_last else "column") or rule.gather:
        return ()
    size = holder.num_inputs if is_last else holder.num_outputs
    return tuple(tuple(rule.spans(size, tp, rank, name=holder.name)) for rank in range(tp))


def _require_ends(rules: Sequence[Rule], shape: ModelShape, *, cuts_sequence: bool) -> None:
    """The embedding, where a sequence is cut, and the head, whose rows the loss is taken of."""
    first, head = (
        rule_of(rules, "embed"),
        rule_of(rules, "embed" if shape.tie_embeddings else "head"),
    )
    if head is not None and head.kind in CUTS and head.kind != "vocab":
        raise LayoutError(
            "a head is cut by tokens", where=_where(head), fix="vocab, or replicate: it stays whole"
        )
    if not cuts_sequence:
        return
    for name, rule, legal in (
        ("embed", first, ("vocab", "sequence")),
        *(
            (("embed_positions", rule_of(rules, "embed_positions"), ("vocab", "sequence")),)
            * (shape.positions == "learned")
        ),
        ("embed" if shape.tie_embeddings else "head", head, ("vocab",)),
    ):
        if rule is None or rule.kind not in legal:
            raise LayoutError(
                f"{name} needs {' or '.join(legal)}, where the sequence is cut between regions",
                where=None if rule is None else _where(rule),
                fix="set parallel.sequence_parallel=false, or leave the rule out",
            )


def _require_whole_classes(head: Rule | None) -> None:
    if head is not None and (head.kind == "row" or (head.kind == "column" and not head.gather)):
        what = "a head over classes needs all features and all classes"
        raise LayoutError(
            what, where=_where(head), fix='"column gather", or replicate: it stays whole'
        )


def _where(rule: Rule) -> str:
    return f'sharding rule "{rule.pattern}" = "{rule.text}"'
