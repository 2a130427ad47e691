"""The frame of a chart over steps: axes, legend, read-out, note and data table around a drawing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.report.markup import Html, build_json_script, build_note, build_tag
from phalanx.report.scales import AxisScale, choose_whole_number_ticks, format_ticks

VIEW_BOX_SIZE = 1000  # of the SVG's own coordinates, both ways


@dataclass(frozen=True)
class ChartFrame:
    """A figure over steps.

    `unit` follows every value in the read-out; `y_label` names the axis with its unit.
    """

    title: str
    y_label: str
    unit: str


@dataclass
class ChartDrawing:
    """The drawn parts of a chart; `draw_figure` puts axes, notes and a table around them."""

    svg: list[Html] = field(default_factory=list)
    over: list[Html | None] = field(default_factory=list)  # HTML on the plot
    end_labels: list[Html] = field(default_factory=list)  # HTML right of the plot
    legend: list[Html] = field(default_factory=list)
    hover: list[list[Any]] = field(default_factory=list)  # as page.js reads it

    def add_hover_values(
        self, name: str, css_class: str, xs: Sequence[float], ys: Sequence[float]
    ) -> None:
        self.hover.append([name, css_class, _round_numbers(xs), _round_numbers(ys)])


def draw_figure(
    chart: ChartFrame,
    x_scale: AxisScale,
    y_scale: AxisScale,
    drawing: ChartDrawing,
    note: str,
    data: Html,
) -> Html:
    """The drawing with its axes, legend, note, table `data`, and the points that page.js reads
    out."""
    grid = [
        draw_path(draw_horizontal_path(y_scale(tick)), "grid") for tick in y_scale.tick_values()
    ]
    svg = build_tag(
        "svg",
        grid,
        drawing.svg,
        viewBox=f"0 0 {VIEW_BOX_SIZE} {VIEW_BOX_SIZE}",
        preserveAspectRatio="none",
        # For eyes alone: read-out and table have the numbers.
        aria_hidden="true",
        focusable="false",
    )
    island = {
        "unit": chart.unit,
        "log": y_scale.is_log,
        "x": [x_scale.low, x_scale.high],
        "series": drawing.hover,
        "y": [y_scale.low, y_scale.high],
    }
    plot = build_tag(
        "div",
        svg,
        draw_y_ticks(y_scale.tick_values(), y_scale),
        _format_x_labels(x_scale),
        drawing.over,
        build_tag("div", class_="cursor", hidden=True),
        class_="plot",
        # Takes the focus, so that arrow keys move the read-out (page.js).
        tabindex=0,
        role="group",
        aria_label=(
            f"{chart.title}: {chart.y_label} over steps."
            " Use the left and right arrow keys to read values."
        ),
    )
    y_label = chart.y_label
    if y_scale.is_log:
        y_label += ", log scale"
    css_class, labels_at_right = "chart", None
    if drawing.end_labels:
        css_class = "chart wide"
        labels_at_right = build_tag("div", drawing.end_labels, class_="beside")
    return build_tag(
        "figure",
        build_tag(
            "figcaption",
            build_tag("h3", chart.title),
            build_tag("div", drawing.legend, class_="legend"),
        ),
        build_tag(
            "div",
            build_tag("span", y_label, class_="ylabel"),
            build_tag("output", class_="readout", aria_live="polite"),
            class_="axis",
        ),
        build_tag("div", plot, labels_at_right, class_="row"),
        build_tag("div", "step", class_="xlabel"),
        build_note(note),
        build_tag("details", build_tag("summary", "Data table"), data),
        build_json_script(island, "points"),
        class_=css_class,
    )


def _format_x_labels(scale: AxisScale) -> list[Html]:
    # A run of one step, or of two, may have no round number inside.
    ticks = choose_whole_number_ticks(scale.low, scale.high, 8) or [round(scale.low)]
    return draw_x_ticks(ticks, scale)


def draw_empty_chart(title: str) -> Html:
    return build_tag(
        "figure",
        build_tag("figcaption", build_tag("h3", title)),
        build_tag("p", "Not measured.", class_="note"),
        class_="chart",
    )


def draw_x_ticks(ticks: Sequence[float], scale: AxisScale) -> list[Html]:
    labels = []
    for tick, text in zip(ticks, format_ticks(ticks), strict=True):
        style = f"left:{100 * scale(tick):.2f}%"
        labels.append(build_tag("span", text, class_="xtick", style=style))
    return labels


def draw_y_ticks(ticks: Sequence[float], scale: AxisScale) -> list[Html]:
    labels = []
    for tick, text in zip(ticks, format_ticks(ticks), strict=True):
        style = f"bottom:{100 * scale(tick):.2f}%"
        labels.append(build_tag("span", text, class_="ytick", style=style))
    return labels


def draw_legend(names: Sequence[str], classes: Mapping[str, str]) -> Html:
    return build_tag(
        "div", [draw_legend_entry(classes[name], name, "block") for name in names], class_="legend"
    )


def draw_legend_entry(css_class: str, name: str, shape: str) -> Html:
    """An entry of a legend; `shape` is "stroke", "dot" or "block"."""
    return build_tag("span", build_tag("i", class_=f"{shape} {css_class}"), name, class_="key")


def draw_path(d: str, css_class: str) -> Html:
    # The plot is stretched with the page; its strokes keep their width.
    return build_tag("path", d=d, class_=css_class, vector_effect="non-scaling-stroke")


def draw_horizontal_path(y: float) -> str:
    return f"M0 {VIEW_BOX_SIZE * (1 - y):.1f}H{VIEW_BOX_SIZE}"


def _round_numbers(values: Sequence[float]) -> list[float | None]:
    # Six digits are more than one can read off a chart, and keep the page small.
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
