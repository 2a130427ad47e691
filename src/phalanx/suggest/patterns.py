"""One rule for all blocks of a module, where they agree: names of modules become patterns with
stars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from phalanx.plan.rules import matches_pattern
from phalanx.suggest.suggestion import NameAndReason


def merge_rules_into_patterns(
    rules: Mapping[str, NameAndReason], parts: Mapping[str, nn.Module]
) -> dict[str, NameAndReason]:
    """The rules by pattern: one line for all blocks if they agree and the pattern matches no other
    module, else one for each.
    """
    by_pattern: dict[str, NameAndReason] = {}
    for name, rule in rules.items():
        # Ends at the latest with the name itself, which matches no other module.
        for pattern in _list_patterns_of_name(name):
            matching = [other for other in parts if matches_pattern(pattern, other)]
            texts = {rules[other][0] if other in rules else "" for other in matching}
            if texts == {rule[0]}:
                by_pattern.setdefault(pattern, rule)
                break
    return by_pattern


def _list_patterns_of_name(name: str) -> Iterator[str]:
    """layers.0.experts.1 -> layers.*.experts.*, layers.*.experts.1, layers.0.experts.1."""
    steps = name.split(".")
    indices = [index for index, step in enumerate(steps) if step.isdigit()]
    for num_numbers in range(len(indices) + 1):
        starred = set(indices[: len(indices) - num_numbers])
        yield ".".join("*" if index in starred else step for index, step in enumerate(steps))
