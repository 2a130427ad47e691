"""Sharding rules for a user's module, found by looking at what it computes; each cut is tried
before it is proposed."""

from __future__ import annotations

from typing import Any

from torch import nn

from phalanx.job.shapes.own_rules import build_pattern_for_all_blocks
from phalanx.mesh.linear import is_linear_layer
from phalanx.run.one_process.plain_loss import Batch
from phalanx.suggest.cutting import CutProposal, find_cut_proposal
from phalanx.suggest.embedding_and_head import find_embedding_and_head_rules
from phalanx.suggest.layer_groups import LayerGroup, find_layer_groups
from phalanx.suggest.observed import ObservedModule
from phalanx.suggest.patterns import merge_rules_into_patterns
from phalanx.suggest.suggestion import NameAndReason, Suggestion
from phalanx.suggest.trial import CutTrialResult, try_cutting
from phalanx.suggest.uncut_parameters import find_uncut_parameter_rules
from phalanx.suggest.visit import has_dropout_between, record_module_call


def propose_rules(module: nn.Module, batch: Batch) -> Suggestion:
    """The rules for a module, which is run with `batch`: pairs of layers first, then embedding
    and head."""
    proposer = _RuleProposer(ObservedModule(module, batch))
    for group in find_layer_groups(proposer.observed):
        proposer.add_rules_of_group(group)
    return proposer.build_suggestion()


class _RuleProposer:
    """Collects the rules of one module by the name of the layer, and the reasons of layers that
    stay whole."""

    def __init__(self, observed: ObservedModule) -> None:
        self.observed = observed
        self._rules: dict[str, NameAndReason] = {}
        self._whole: dict[str, str] = {}
        # Blocks are alike: what one of them gave, a group or a refusal, holds for the others.
        self._outcomes: dict[Any, LayerGroup | str] = {}

    def add_rules_of_group(self, group: LayerGroup) -> None:
        """Add the rules of a group, or the reason why its layers stay whole."""
        parts = self.observed.parts
        key = (
            tuple(build_pattern_for_all_blocks(name) for name in group.names),
            tuple(tuple(parts[name].weight.shape) for name in group.names),
        )
        if key not in self._outcomes:
            self._outcomes[key] = self._add_rules_by_trial(group) or group
        outcome = self._outcomes[key]
        if isinstance(outcome, str):
            self._whole |= dict.fromkeys(group.names, outcome)
        elif outcome is not group:
            self._copy_rules_of_like_group(outcome, group)

    def build_suggestion(self) -> Suggestion:
        """The suggestion of the groups so far, with embedding, head and what stays whole."""
        ends = find_embedding_and_head_rules(self.observed, self._rules)
        self._rules |= ends.rules
        self._whole |= ends.whole
        for name, part in self.observed.parts.items():
            is_cuttable = is_linear_layer(part) or isinstance(part, nn.Embedding)
            if is_cuttable and name not in self._rules:
                self._whole.setdefault(name, self._explain_unsharded_layer(name))
            if isinstance(part, nn.MultiheadAttention):
                self._whole[name] = "torch's own attention multiplies by its matrices itself"
        suggestion = Suggestion(merge_rules_into_patterns(self._rules, self.observed.parts))
        if not self._rules:
            suggestion.why_none = self._explain_no_rules()
        for name, why in self._whole.items():
            suggestion.whole.setdefault(build_pattern_for_all_blocks(name), why)
        return suggestion

    def _explain_no_rules(self) -> str:
        parts = self.observed.parts.values()
        holders = {type(part).__name__ for part in parts if list(part.parameters(recurse=False))}
        if not holders:
            return "the module has no parameters"
        if any(is_linear_layer(part) or isinstance(part, nn.Embedding) for part in parts):
            return ""  # of each it is said why it stays whole
        return (
            "rules cut linear layers and embeddings, and its parameters are those of "
            f"{', '.join(sorted(holders))}; parallel.dp_shard shards parameters of any module"
        )

    def _explain_unsharded_layer(self, name: str) -> str:
        if name in self.observed.flow.called_often:
            return "it is called more than once in a forward"
        if name not in self.observed.flow.outputs:
            return "a forward never calls it"
        return "no pair of layers was found in which one feeds another alone"

    def _copy_rules_of_like_group(self, first: LayerGroup, group: LayerGroup) -> None:
        """Give a group the rules of the first one that is like it, in another block."""
        pairs = zip((*first.names, first.home), (*group.names, group.home), strict=True)
        translated = dict(pairs)
        for name, rule in list(self._rules.items()):
            is_inside = name == first.home or name.startswith(f"{first.home}.")
            if first.home and is_inside:
                self._rules.setdefault(group.home + name[len(first.home) :], rule)
            elif name in translated:
                self._rules.setdefault(translated[name], rule)

    def _add_rules_by_trial(self, group: LayerGroup) -> str:
        """Add the rules of a group; returns why it has none, or ""."""
        observed = self.observed
        home_pattern = build_pattern_for_all_blocks(group.home)
        if has_dropout_between(observed, group):
            home = home_pattern or "the module itself"
            return (
                f"{home} drops at random between its matrices: look again with 0 for that in"
                " model.args"
            )
        cutting = find_cut_proposal(observed.flow, group.row, group.columns)
        if cutting is None:
            return (
                f"what {build_pattern_for_all_blocks(group.row)} takes in depends on all features,"
                " not on"
                " those of a head alone"
            )
        visit = record_module_call(observed, group)
        if visit.num_calls != 1:
            return f"{home_pattern} is called {visit.num_calls} times in a forward"
        layer_names = [group.name_within_home(name) for name in group.names]
        trial = try_cutting(observed.parts[group.home], layer_names, cutting, visit)
        if trial.refused:
            return trial.refused
        surroundings = find_uncut_parameter_rules(observed, group, visit)
        if surroundings.refused:
            return surroundings.refused
        rules = dict(surroundings.rules)
        home_rule = _add_counts_to_home_rule(rules.pop(group.home, ("replicate", "")), trial)
        if home_rule is not None:
            if self._rules.get(group.home):
                return f"{home_pattern} has another cut inside"
            self._rules[group.home] = home_rule
        for name, rule in rules.items():
            self._rules.setdefault(name, rule)
        self._add_layer_rules(group, cutting)
        return ""

    def _add_layer_rules(self, group: LayerGroup, cutting: CutProposal) -> None:
        row_name = group.name_within_home(group.row)
        for name, text in zip(group.columns, cutting.columns, strict=True):
            why = f"{group.name_within_home(name)} feeds {row_name} alone, {cutting.why}"
            self._rules[name] = (text, why)
        column_names = ", ".join(group.name_within_home(name) for name in group.columns)
        verb = "put"
        if len(group.columns) == 1:
            verb = "puts"
        self._rules[group.row] = (cutting.row, f"takes what {column_names} {verb} out")


def _add_counts_to_home_rule(
    home_rule: NameAndReason, trial: CutTrialResult
) -> NameAndReason | None:
    """The rule of a home, with the counts that a trial found to be divided; None if it needs
    none."""
    kind, why = home_rule
    if not trial.divide:
        if kind != "replicate":
            return home_rule
        return None
    counts = ", ".join(trial.divide)
    verb = "count"
    if len(trial.divide) == 1:
        verb = "counts"
    reasons = [why] if why else []
    reasons.append(f"{counts} {verb} what is cut")
    return f"{kind} divide={','.join(trial.divide)}", "; ".join(reasons)
