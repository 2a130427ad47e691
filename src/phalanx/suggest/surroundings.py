"""Rules of what surrounds a cut: the home of its layers, and parameters in it that are not cut
themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.plan.rule_checks import pattern_of
from phalanx.suggest.layer_groups import LayerGroup
from phalanx.suggest.observed import ObservedModule
from phalanx.suggest.suggestion import Reasoned
from phalanx.suggest.visit import Visit


@dataclass(frozen=True)
class Surroundings:
    """The rules of what surrounds a cut, by module name; or why there are none that would do."""

    rules: Mapping[str, Reasoned]
    refused: str = ""


@dataclass(frozen=True)
class _Uses:
    """The uses of each parameter of the home that is not cut, in one visit.

    before: on the way to the columns. between: between columns and row. after: behind the row.
    """

    before: Mapping[str, bool]
    between: Mapping[str, bool]
    after: Mapping[str, bool]


def find_surroundings(observed: ObservedModule, group: LayerGroup, visit: Visit) -> Surroundings:
    """The rules of the group's home, and of the parameters in it that the group does not hold."""
    home_pattern = pattern_of(group.home)
    uses = _find_uses(observed, group, visit)
    # Inputs that reach the home's output around the cut layers (a residual) need no region.
    outputs = find_tensors(visit.output)
    passes_by = visit.entered is None or _depends_on(outputs, [visit.entered])[0]
    is_region = bool(group.home) and not passes_by
    rules: dict[str, Reasoned] = {}
    for name in uses.between:
        owner = group.find_owner(name)
        sees_part = uses.between[name] or (uses.before[name] and is_region)
        if sees_part and uses.after[name]:
            return Surroundings({}, f"{name} of {home_pattern} is used before and after the cut")
        if uses.between[name] and not is_region:
            rules[owner] = ("partial", "each rank puts its own part through it")
        if is_region and not sees_part and uses.after[name]:
            if owner == group.home:
                return Surroundings({}, f"{name} of {home_pattern} is used behind the cut")
            rules[owner] = ("replicate", "it comes behind the row, where every rank has all")
    for name in uses.between:
        rule, _ = rules.get(group.find_owner(name), ("", ""))
        is_used_elsewhere = uses.after[name] or uses.before[name]
        if rule == "partial" and not uses.between[name] and is_used_elsewhere:
            return Surroundings(
                {},
                f"{name} of {home_pattern} is used outside the cut, and others beside it within",
            )
    if is_region:
        rules[group.home] = ("region", "what enters it goes to these layers alone")
    return Surroundings(rules)


def _find_uses(observed: ObservedModule, group: LayerGroup, visit: Visit) -> _Uses:
    parameters = _find_uncut_parameters(observed, group)

    def find_users(outputs: Sequence[torch.Tensor | None]) -> dict[str, bool]:
        depends = _depends_on(outputs, list(parameters.values()))
        return dict(zip(parameters, depends, strict=True))

    return _Uses(
        before=find_users(visit.column_inputs),
        between=find_users([visit.row_input]),
        after=find_users(find_tensors(visit.output)),
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


def find_tensors(tree: Any) -> list[torch.Tensor]:
    """The floating-point tensors in what a module returns."""
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _depends_on(
    outputs: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
) -> list[bool]:
    """One boolean for each of `inputs`: True if any of `outputs` depends on it."""
    roots = [output for output in outputs if output is not None and output.requires_grad]
    if not roots or not inputs:
        return [False] * len(inputs)
    grads = torch.autograd.grad(
        [root.square().sum() for root in roots], list(inputs), allow_unused=True, retain_graph=True
    )
    return [grad is not None and bool(grad.any()) for grad in grads]
