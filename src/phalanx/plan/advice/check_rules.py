"""Checks a plan against every rule of thumb: the folder `plan/rules_of_thumb` is the registry."""

from __future__ import annotations

import importlib
from functools import cache

from phalanx.core.registry import list_modules_of_registry
from phalanx.plan.advice.facts import PlanFacts
from phalanx.plan.advice.rule import RuleOfThumb, RuleVerdict

_RULES_PACKAGE = "phalanx.plan.rules_of_thumb"
_STATE_SORT_ORDER = {"fails": 0, "tight": 1, "unknown": 2, "holds": 3}


@cache
def list_rules_of_thumb() -> tuple[RuleOfThumb, ...]:
    """Every rule, group by group."""
    rules: list[RuleOfThumb] = []
    for group in list_modules_of_registry(_RULES_PACKAGE):
        rules += importlib.import_module(f"{_RULES_PACKAGE}.{group}").RULES
    return tuple(rules)


def evaluate_rules_of_thumb(facts: PlanFacts) -> list[RuleVerdict]:
    """The verdicts on a plan of all rules that apply to it, those that fail first."""
    verdicts = []
    for rule in list_rules_of_thumb():
        verdict = rule.evaluate(facts)
        if verdict is not None:
            verdicts.append(verdict)
    return sorted(verdicts, key=lambda verdict: _STATE_SORT_ORDER[verdict.state])
