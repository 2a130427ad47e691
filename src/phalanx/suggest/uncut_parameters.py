"""Rules of what surrounds a cut: the home of its layers, and parameters in it that are not cut
themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.job.shapes.own_rules import build_pattern_for_all_blocks
from phalanx.suggest.layer_groups import LayerGroup
from phalanx.suggest.observed import ObservedModule
from phalanx.suggest.suggestion import NameAndReason
from phalanx.suggest.visit import RecordedModuleCall


@dataclass(frozen=True)
class UncutParameterRules:
    """The rules of what surrounds a cut, by module name; or why there are none that would do."""

    rules: Mapping[str, NameAndReason]
    refused: str = ""


@dataclass(frozen=True)
class _ParameterUses:
    """The uses of each parameter of the home that is not cut, in one visit.

    before: on the way to the columns. between: between columns and row. after: behind the row.
    """

    before: Mapping[str, bool]
    between: Mapping[str, bool]
    after: Mapping[str, bool]

    def receives_cut_features(self, name: str, *, is_region: bool) -> bool:
        """True if a rank's gradient of it is a part: it is used between the cut layers, or before
        them within a region."""
        return self.between[name] or (self.before[name] and is_region)

    def is_after_cut_layer(self, name: str, *, is_region: bool) -> bool:
        return (
            is_region
            and self.after[name]
            and not self.receives_cut_features(name, is_region=is_region)
        )

    def is_only_outside_cut(self, name: str) -> bool:
        return not self.between[name] and (self.after[name] or self.before[name])

    def describe_uses_without_rule(self, name: str, *, is_region: bool, is_of_home: bool) -> str:
        """The uses for which there is no rule, in words; "" if there is one."""
        if self.after[name] and self.receives_cut_features(name, is_region=is_region):
            return "before and after the cut"
        if is_of_home and self.is_after_cut_layer(name, is_region=is_region):
            return "behind the cut"
        return ""


def find_uncut_parameter_rules(
    observed: ObservedModule, group: LayerGroup, visit: RecordedModuleCall
) -> UncutParameterRules:
    """The rules of the group's home, and of the parameters in it that the group does not hold."""
    home_pattern = build_pattern_for_all_blocks(group.home)
    uses = _find_parameter_uses(observed, group, visit)
    # Inputs that reach the home's output around the cut layers (a residual) need no region.
    outputs = find_float_tensors(visit.output)
    passes_by = visit.entered is None or _list_dependence_on_inputs(outputs, [visit.entered])[0]
    is_region = bool(group.home) and not passes_by
    rules: dict[str, NameAndReason] = {}
    for name in uses.between:
        owner = group.find_parameter_owner(name)
        where = uses.describe_uses_without_rule(
            name, is_region=is_region, is_of_home=owner == group.home
        )
        if where:
            return UncutParameterRules({}, f"{name} of {home_pattern} is used {where}")
        if uses.between[name] and not is_region:
            rules[owner] = ("partial", "each rank puts its own part through it")
        if uses.is_after_cut_layer(name, is_region=is_region):
            rules[owner] = ("replicate", "it comes behind the row, where every rank has all")
    # Only now are all owners known: "partial" is a rule of all that a module holds.
    for name in uses.between:
        rule, _ = rules.get(group.find_parameter_owner(name), ("", ""))
        if rule == "partial" and uses.is_only_outside_cut(name):
            return UncutParameterRules(
                {},
                f"{name} of {home_pattern} is used outside the cut, and others beside it within",
            )
    if is_region:
        rules[group.home] = ("region", "what enters it goes to these layers alone")
    return UncutParameterRules(rules)


def _find_parameter_uses(
    observed: ObservedModule, group: LayerGroup, visit: RecordedModuleCall
) -> _ParameterUses:
    parameters = _find_uncut_parameters(observed, group)

    def find_used_parameters(outputs: Sequence[torch.Tensor | None]) -> dict[str, bool]:
        depends = _list_dependence_on_inputs(outputs, list(parameters.values()))
        return dict(zip(parameters, depends, strict=True))

    return _ParameterUses(
        before=find_used_parameters(visit.column_inputs),
        between=find_used_parameters([visit.row_input]),
        after=find_used_parameters(find_float_tensors(visit.output)),
    )


def _find_uncut_parameters(observed: ObservedModule, group: LayerGroup) -> dict[str, nn.Parameter]:
    """Trained parameters of the group's home that none of its layers holds, named within the
    home."""
    cut_ids: set[int] = set()
    for name in group.names:
        cut_ids |= {id(parameter) for parameter in observed.parts[name].parameters()}
    return {
        name: parameter
        for name, parameter in observed.parts[group.home].named_parameters()
        if id(parameter) not in cut_ids and parameter.requires_grad
    }


def find_float_tensors(tree: Any) -> list[torch.Tensor]:
    """The floating-point tensors in what a module returns."""
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _list_dependence_on_inputs(
    outputs: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
) -> list[bool]:
    """One boolean for each of `inputs`: True if any of `outputs` depends on it."""
    roots = [output for output in outputs if output is not None and output.requires_grad]
    if not roots or not inputs:
        return [False] * len(inputs)
    # Squares: the plain sum of what a softmax makes is constant, and its gradient zero.
    grads = torch.autograd.grad(
        [root.square().sum() for root in roots], list(inputs), allow_unused=True, retain_graph=True
    )
    return [grad is not None and bool(grad.any()) for grad in grads]
