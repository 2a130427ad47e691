"""What must hold in any training: what was checked, what failed, and what was not looked at."""

from __future__ import annotations

from phalanx.core.units import plural
from phalanx.observe.invariant_words import describe_failed_check, describe_invariant
from phalanx.report.facts import RunFacts
from phalanx.report.invariant_facts import InvariantFacts
from phalanx.report.markup import Html, build_table, build_tag

MAX_SHOWN_FAILURES = 5


def has_invariants(facts: RunFacts) -> bool:
    return bool(facts.invariants)


def render_invariants(facts: RunFacts) -> Html | None:
    """The section; None for a run that checked nothing, or has not summed it up yet."""
    if not has_invariants(facts):
        return None
    rows = [_render_invariant_row(invariant) for invariant in facts.invariants]
    note = (
        "Weights are checked at the first step, at each observe.invariants_every-th and at the"
        " last, and before and after each evaluation; targets and loads in every step."
    )
    return build_tag(
        "section",
        build_tag("h2", "Checks"),
        [build_tag("p", text, class_="note warning") for text in _list_failure_sentences(facts)],
        build_table(
            ["what must hold", "result", "looked at", "not looked at"], rows, css_class="top prose"
        ),
        build_tag("p", note, class_="note"),
        id="checks",
    )


def _render_invariant_row(invariant: InvariantFacts) -> list[str]:
    return [
        describe_invariant(invariant.name),
        _describe_check_result(invariant),
        invariant.looked_at,
        "; ".join(invariant.not_looked_at),
    ]


def _describe_check_result(invariant: InvariantFacts) -> str:
    if invariant.has_held is None:
        return "not checked"
    if invariant.has_held:
        return f"held in {plural(invariant.num_checks, 'check')}"
    first_step = invariant.last_step
    if invariant.failures:
        first_step = invariant.failures[0].step
    if not invariant.num_checks:
        return f"failed, first at step {first_step:,}"
    num_failed = f"{invariant.num_failed:,} of {plural(invariant.num_checks, 'check')}"
    return f"failed in {num_failed}, first at step {first_step:,}"


def _list_failure_sentences(facts: RunFacts) -> list[str]:
    sentences = []
    for invariant in facts.invariants:
        failures = invariant.failures
        sentences += [describe_failed_check(event) for event in failures[:MAX_SHOWN_FAILURES]]
        if len(failures) > MAX_SHOWN_FAILURES:
            sentences.append(f"{len(failures) - MAX_SHOWN_FAILURES} more; all are in RUN/events")
    return sentences
