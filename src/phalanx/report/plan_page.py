"""`write_plan_page`: a plan as one self-contained page, that opens anywhere and loads nothing."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.files import write_bytes_atomically
from phalanx.report.markup import Html, build_tag, join_html
from phalanx.report.page import CONTENT_SECURITY_POLICY
from phalanx.report.plan_facts import PlanPageFacts
from phalanx.report.plan_sections.answer import (
    render_nearest_fits,
    render_plan_header,
    render_ranking,
    render_refused_layouts,
)
from phalanx.report.plan_sections.assumptions import render_assumptions, render_job_text
from phalanx.report.plan_sections.memory import render_planned_memory
from phalanx.report.plan_sections.rules import render_decision_tables, render_rules_of_thumb
from phalanx.report.plan_sections.step import render_planned_pipeline, render_waterfall
from phalanx.report.plan_sections.what_if import render_what_if

# In the order of the page; a section that has nothing to show is left out, with its link.
_SECTIONS = (
    ("Ranking", render_ranking),
    ("Nearest", render_nearest_fits),
    ("Time", render_waterfall),
    ("Memory", render_planned_memory),
    ("Pipeline", render_planned_pipeline),
    ("What if", render_what_if),
    ("Rules", render_rules_of_thumb),
    ("Decision tables", render_decision_tables),
    ("Why not", render_refused_layouts),
    ("Assumptions", render_assumptions),
    ("Job", render_job_text),
)
_SECTION_IDS = {
    "Ranking": "ranking", "Nearest": "nearest", "Time": "time", "Memory": "memory",
    "Pipeline": "pipeline", "What if": "what-if", "Rules": "rules", "Decision tables": "tables",
    "Why not": "refused", "Assumptions": "assumptions", "Job": "job",
}  # fmt: skip


def write_plan_page(path: Path, facts: PlanPageFacts) -> None:
    """Write the page of a plan to `path`. Raises ResourceError."""
    try:
        write_bytes_atomically(path, render_plan_page(facts).encode())
    except OSError as error:
        raise build_path_resource_error(error, "writing the page", path, place="--page") from None


def render_plan_page(facts: PlanPageFacts) -> str:
    """The page of a plan, as HTML text."""
    sections: dict[str, Html] = {}
    for name, render in _SECTIONS:
        section = render(facts)
        if section is not None:
            sections[name] = section
    # Html, not text: files of our own go into the page as they are.
    style = Html(_read_package_file("page.css") + _read_package_file("plan_page.css"))
    head = build_tag(
        "head",
        build_tag("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">'),
        build_tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        build_tag("title", f"{facts.model} on {facts.cluster} · phalanx plan"),
        # Else a browser asks for /favicon.ico.
        build_tag("link", rel="icon", href="data:,"),
        build_tag("style", style),
    )
    links = [build_tag("a", name, href=f"#{_SECTION_IDS[name]}") for name in sections]
    footer = build_tag(
        "footer",
        "Predicted by phalanx plan; nothing here was measured unless it says so. This file is"
        " complete in itself and loads nothing.",
    )
    body = build_tag(
        "body",
        build_tag("a", "Skip to the numbers", href="#main", class_="skip-link"),
        build_tag(
            "div",
            render_plan_header(facts),
            build_tag("nav", links, aria_label="Sections"),
            build_tag("main", join_html(sections.values()), id="main"),
            footer,
            class_="page",
        ),
        build_tag("script", Html(_read_package_file("plan_page.js"))),
    )
    return f"<!doctype html>\n{build_tag('html', head, body, lang='en')}\n"


def _read_package_file(name: str) -> str:
    return files("phalanx.report").joinpath(name).read_text("utf-8")
