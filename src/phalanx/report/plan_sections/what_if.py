"""Sliders over a grid that the planner computed: between its points the page interpolates, and
outside of them it says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.report.markup import Html, build_json_script, build_note, build_tag
from phalanx.report.plan_facts import PlanPageFacts

# Positions of a slider between two points of the grid.
SLIDER_STEPS_BETWEEN_POINTS = 20


def render_what_if(facts: PlanPageFacts) -> Html | None:
    """The section of the sliders; None without a grid."""
    grid = facts.what_if
    if not grid:
        return None
    axes = [*grid["axes"], grid["memory_axis"]]
    controls = [_render_slider(number, axis) for number, axis in enumerate(axes)]
    return build_tag(
        "section",
        build_tag("h2", "What if"),
        build_tag("div", controls, class_="controls"),
        build_tag(
            "dl",
            _render_outputs(grid.get("counted_unit", "tokens")),
            class_="keys answers",
            aria_live="polite",
        ),
        build_tag(
            "div",
            _render_curve_figure("step", "Step time"),
            _render_curve_figure("memory", "Peak memory"),
            class_="pair curves",
        ),
        build_note(
            "Dots are points that the planner computed; between them the page interpolates."
            " Where a point is missing, the batch does not divide or the planner computed nothing,"
            " and nothing is claimed. The layout's tp, pp, cp and ep stay as they are; data"
            " parallelism takes the other GPUs, and the global batch stays."
        ),
        build_tag("noscript", build_note("The sliders need JavaScript.")),
        build_json_script(dict(grid), "grid"),
        id="what-if",
    )


def _render_slider(number: int, axis: Mapping[str, Any]) -> Html:
    values, start = axis["values"], int(axis["start"])
    name = f"what-if-{number}"
    if axis["kind"] == "choice":
        options = [
            build_tag("option", str(value), value=index, selected=index == start)
            for index, value in enumerate(values)
        ]
        control = build_tag("select", options, id=name, data_axis=number)
        return build_tag(
            "div", build_tag("label", axis["label"], for_=name), control, class_="control"
        )
    num_between = 1
    if axis["kind"] == "range":
        num_between = SLIDER_STEPS_BETWEEN_POINTS
    last = len(values) - 1
    points = [
        build_tag("i", style=f"left:{100 * index / max(last, 1):.2f}%")
        for index in range(len(values))
    ]
    slider = build_tag(
        "input",
        type="range",
        id=name,
        min=0,
        max=last * num_between,
        value=start * num_between,
        step=1,
        data_axis=number,
        data_between=num_between,
        disabled=last == 0,
    )
    return build_tag(
        "div",
        build_tag("label", axis["label"], for_=name),
        build_tag("output", "", for_=name),
        build_tag("div", slider, build_tag("div", points, class_="points"), class_="slide"),
        class_="control",
        # The page's script reads each axis; of one value there is nothing to move, or to show.
        style="display:none" if last == 0 else None,
    )


def _render_outputs(counted_unit: str) -> list[Html]:
    names = (
        ("step_s", "Step time"),
        ("tokens_per_s", f"{counted_unit.capitalize()}/s per GPU"),
        ("peak", "Peak memory"),
        ("fits", "Verdict"),
    )
    return [
        build_tag("div", build_tag("dt", text), build_tag("dd", "–", data_output=key))
        for key, text in names
    ]


def _render_curve_figure(key: str, title: str) -> Html:
    return build_tag(
        "figure",
        build_tag("figcaption", build_tag("h3", title)),
        build_tag("div", class_="curve", data_curve=key, role="img", aria_label=title),
    )
