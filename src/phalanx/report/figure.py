"""The frame of a chart over steps: axes, legend, read-out, note and data table around a drawing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.report.markup import Html, json_island, tag, tag_note
from phalanx.report.scales import Scale, tick_texts, whole_ticks

SIZE = 1000  # of the SVG's own coordinates, both ways


@dataclass(frozen=True)
class Chart:
    """A figure over steps.

    `unit` follows every value in the read-out; `y_label` names the axis with its unit.
    """

    title: str
    y_label: str
    unit: str


@dataclass
class Drawing:
    """The drawn parts of a chart; `draw_figure` puts axes, notes and a table around them."""

    svg: list[Html] = field(default_factory=list)
    over: list[Html | None] = field(default_factory=list)  # HTML on the plot
    end_labels: list[Html] = field(default_factory=list)  # HTML right of the plot
    legend: list[Html] = field(default_factory=list)
    hover: list[list[Any]] = field(default_factory=list)  # as page.js reads it

    def add_hover(
        self, name: str, css_class: str, xs: Sequence[float], ys: Sequence[float]
    ) -> None:
        self.hover.append([name, css_class, _numbers(xs), _numbers(ys)])


def draw_figure(
    chart: Chart,
    x_scale: Scale,
    y_scale: Scale,
    drawing: Drawing,
    note: str,
    data: Html,
) -> Html:
    """The drawing with its axes, legend, note, table `data`, and the points that page.js reads
    out."""
    grid = [draw_path(horizontal_path(y_scale(tick)), "grid") for tick in y_scale.ticks()]
    svg = tag(
        "svg",
        grid,
        drawing.svg,
        viewBox=f"0 0 {SIZE} {SIZE}",
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
    plot = tag(
        "div",
        svg,
        draw_y_ticks(y_scale.ticks(), y_scale),
        _x_labels(x_scale),
        drawing.over,
        tag("div", class_="cursor", hidden=True),
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
        labels_at_right = tag("div", drawing.end_labels, class_="beside")
    return tag(
        "figure",
        tag("figcaption", tag("h3", chart.title), tag("div", drawing.legend, class_="legend")),
        tag(
            "div",
            tag("span", y_label, class_="ylabel"),
            tag("output", class_="readout", aria_live="polite"),
            class_="axis",
        ),
        tag("div", plot, labels_at_right, class_="row"),
        tag("div", "step", class_="xlabel"),
        tag_note(note),
        tag("details", tag("summary", "Data table"), data),
        json_island(island, "points"),
        class_=css_class,
    )


def _x_labels(scale: Scale) -> list[Html]:
    # A run of one step, or of two, may have no round number inside.
    ticks = whole_ticks(scale.low, scale.high, 8) or [round(scale.low)]
    return draw_x_ticks(ticks, scale)


def draw_nothing(title: str) -> Html:
    return tag(
        "figure",
        tag("figcaption", tag("h3", title)),
        tag("p", "Not measured.", class_="note"),
        class_="chart",
    )


def draw_x_ticks(ticks: Sequence[float], scale: Scale) -> list[Html]:
    labels = []
    for tick, text in zip(ticks, tick_texts(ticks), strict=True):
        style = f"left:{100 * scale(tick):.2f}%"
        labels.append(tag("span", text, class_="xtick", style=style))
    return labels


def draw_y_ticks(ticks: Sequence[float], scale: Scale) -> list[Html]:
    labels = []
    for tick, text in zip(ticks, tick_texts(ticks), strict=True):
        style = f"bottom:{100 * scale(tick):.2f}%"
        labels.append(tag("span", text, class_="ytick", style=style))
    return labels


def draw_legend(names: Sequence[str], classes: Mapping[str, str]) -> Html:
    return tag("div", [draw_key(classes[name], name, "block") for name in names], class_="legend")


def draw_key(css_class: str, name: str, shape: str) -> Html:
    """An entry of a legend; `shape` is "stroke", "dot" or "block"."""
    return tag("span", tag("i", class_=f"{shape} {css_class}"), name, class_="key")


def draw_path(d: str, css_class: str) -> Html:
    # The plot is stretched with the page; its strokes keep their width.
    return tag("path", d=d, class_=css_class, vector_effect="non-scaling-stroke")


def horizontal_path(y: float) -> str:
    return f"M0 {SIZE * (1 - y):.1f}H{SIZE}"


def _numbers(values: Sequence[float]) -> list[float | None]:
    # Six digits are more than one can read off a chart, and keep the page small.
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
