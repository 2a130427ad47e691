"""Rules of thumb with this plan's numbers, and what decision tables of the field say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.report.formats import text_or_missing
from phalanx.report.markup import Html, build_note, build_small_text, build_table, build_tag
from phalanx.report.plan_facts import PlanPageFacts

_STATE_SIGNS = {"fails": "✗", "tight": "!", "unknown": "?", "holds": "✓"}
_STATE_WORDS = {
    "fails": "does not hold",
    "tight": "only just",
    "unknown": "not judged",
    "holds": "holds",
}


def render_rules_of_thumb(facts: PlanPageFacts) -> Html | None:
    """The section of the rules; None without any."""
    if not facts.rules:
        return None
    failing = [rule for rule in facts.rules if rule.get("state") == "fails"]
    passing_rules = [rule for rule in facts.rules if rule.get("state") != "fails"]
    shown: Html | None = build_note("Every rule that could be judged holds.")
    if failing:
        shown = _render_rule_table(failing)
    more = None
    if passing_rules:
        summary = f"{len(passing_rules)} rules that hold, or could not be judged"
        more = build_tag(
            "details",
            build_tag("summary", summary),
            _render_rule_table(passing_rules),
            open=not failing,
        )
    return build_tag(
        "section",
        build_tag("h2", "Rules of thumb, with this plan's numbers"),
        shown,
        more,
        id="rules",
    )


def _render_rule_table(rules: list[Mapping[str, Any]]) -> Html:
    head = ["", "rule", "this plan", "what follows, and what to do"]
    return build_table(head, [_build_rule_row(rule) for rule in rules], css_class="top rules")


def _build_rule_row(rule: Mapping[str, Any]) -> list[Html | str]:
    state = str(rule.get("state"))
    remedy = None
    if rule.get("remedy") and state in ("fails", "tight"):
        remedy = build_tag("div", f"Try {rule['remedy']}.")
    correction = str(rule.get("correction") or "")
    if correction:
        correction = f"Often said otherwise: {correction}"
    consequence = text_or_missing(rule.get("consequence"), "")
    if consequence:
        consequence = f"{consequence[0].upper()}{consequence[1:]}."
    sign = build_tag(
        "b", _STATE_SIGNS.get(state, "?"), class_=f"state {state}", title=_STATE_WORDS.get(state)
    )
    return [
        sign,
        build_tag(
            "div",
            text_or_missing(rule.get("title"), ""),
            build_small_text(str(rule.get("evidence") or "")),
            class_="two words",
        ),
        build_tag("div", text_or_missing(rule.get("comparison"), ""), class_="words short"),
        build_tag(
            "div", build_tag("div", consequence), remedy, build_small_text(correction), class_="two"
        ),
    ]


def render_decision_tables(facts: PlanPageFacts) -> Html | None:
    """The section of the decision tables; None without any."""
    if not facts.tables:
        return None
    rows = []
    for answer in facts.tables:
        verdict = "agrees"
        if answer.get("agrees") is None:
            verdict = "no row"
        elif not answer["agrees"]:
            verdict = f"differs: {answer.get('differences')}"
        rows.append(
            [
                text_or_missing(answer.get("table"), ""),
                build_tag("div", text_or_missing(answer.get("says"), ""), class_="words"),
                build_tag("div", verdict, class_="words"),
                build_tag("div", text_or_missing(answer.get("note"), ""), class_="words"),
            ]
        )
    return build_tag(
        "section",
        build_tag("h2", "What decision tables of the field say"),
        build_table(["table", "says", "beside the plan", "to know"], rows, css_class="top"),
        build_note(
            "Heuristics that guides print. Nothing is decided by them, and for the same model they"
            " contradict each other."
        ),
        id="tables",
    )
