"""What a plan rests on: the cluster, what is assumed, where constants come from, and its job."""

from __future__ import annotations

from phalanx.report.markup import Html, build_table, build_tag
from phalanx.report.plan_facts import PlanPageFacts


def render_assumptions(facts: PlanPageFacts) -> Html:
    """The section of cluster, assumptions and constants."""
    hardware = [
        [name, build_tag("div", value, class_="words")] for name, value in facts.hardware.items()
    ]
    assumptions = [build_tag("li", text) for text in facts.assumptions]
    constants = None
    if facts.constants:
        rows = [
            [build_tag("code", name), value, build_tag("div", source, class_="words")]
            for name, value, source in facts.constants
        ]
        constants = build_tag(
            "details",
            build_tag("summary", f"{len(rows)} constants and their sources"),
            build_table(["constant", "value", "source"], rows, css_class="top"),
        )
    return build_tag(
        "section",
        build_tag("h2", "Cluster and assumptions"),
        build_table(["", ""], hardware) if hardware else None,
        build_tag("ul", assumptions, class_="block") if assumptions else None,
        constants,
        id="assumptions",
    )


def render_job_text(facts: PlanPageFacts) -> Html | None:
    """The job file of the winner; None where there is none."""
    if not facts.job_text:
        return None
    return build_tag(
        "section",
        build_tag("h2", "The job"),
        build_tag("pre", facts.job_text),
        id="job",
    )
