"""Small SVG charts: lines over steps, stacked columns over steps, stacked bars.

The plot stretches with the page (`preserveAspectRatio="none"` and strokes that do not scale); its
text is HTML placed in per cent, so that it keeps its size at any width. Each chart carries its
points for the hover read-out and a table for those who cannot or would rather not look at a
picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.report.figure import (
    VIEW_BOX_SIZE,
    ChartDrawing,
    ChartFrame,
    draw_empty_chart,
    draw_figure,
    draw_horizontal_path,
    draw_legend_entry,
    draw_path,
)
from phalanx.report.markup import Html, build_table, build_tag, join_html
from phalanx.report.sample import select_extremes, split_into_buckets
from phalanx.report.scales import AxisScale, choose_scale

# Curves are SVG of our own: a few hundred lines instead of a chart library of megabytes in the
# page of every run.
MAX_LINE_POINTS = 1200  # two per pixel column of the plot: more cannot be seen
MAX_BAND_COLUMNS = 120
MAX_TABLE_ROWS = 40
MAX_EVENT_MARKS = 150
MAX_POINTS_WITH_DOTS = 60
# Of the plot's height, so that labels beside it do not overlap.
MIN_LABEL_GAP = 0.075
# Of the plot's width, about that of "restart 12": nearer marks have no text. The second on a phone.
MARK_LABEL_WIDTH_SHARE = 0.16
NARROW_MARK_LABEL_WIDTH_SHARE = 0.6


@dataclass(frozen=True)
class ChartSeries:
    """One line.

    `css_class` chooses its colour and weight; `end_label` is written beside its last point.

    `dots`: single measurements, joined by a thin line; where they are too many to tell apart, the
    line alone.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    css_class: str = "s0"
    dots: bool = False
    end_label: str = ""

    @property
    def legend_shape(self) -> str:
        if self.dots:
            return "dot"
        return "stroke"


@dataclass(frozen=True)
class ReferenceLine:
    """A horizontal line to compare with."""

    name: str
    value: float
    label: str
    css_class: str = "ref"


NAME_OF_LINE_MARK = {
    "restart": "restart",
    "back": "back to an earlier checkpoint",
    "layout": "other number of ranks",
    "resume": "resume",
}
"""By kind of a vertical line, which is its class in the style, too: its words in the legend."""


@dataclass(frozen=True)
class EventMark:
    """Something that happened at a step: a vertical line (a kind of `NAME_OF_LINE_MARK`) or a cross
    at a value ("skip")."""

    kind: str
    x: float
    title: str
    y: float = math.nan


@dataclass(frozen=True)
class LineChart(ChartFrame):
    """Lines over steps."""

    series: Sequence[ChartSeries]
    references: Sequence[ReferenceLine] = ()
    marks: Sequence[EventMark] = ()
    zero: bool = False
    may_be_log: bool = False
    note: str = ""
    x_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class StackChart(ChartFrame):
    """Columns over steps, each the mean of its bucket, stacked in the order of `parts`."""

    xs: Sequence[float]
    parts: Mapping[str, Sequence[float]]
    classes: Mapping[str, str]
    note: str = ""
    x_range: tuple[float, float] | None = None


def draw_line_chart(chart: LineChart) -> Html:
    """The chart as a figure; one line of text instead if nothing was measured."""
    if not _has_finite_value(chart.series):
        return draw_empty_chart(chart.title)
    sampled = [_downsample_series(series) for series in chart.series]
    steps: list[float] = []
    values: list[float] = []
    for series in sampled:
        steps += series.xs
        values += series.ys
    # Lines to compare with belong to the picture, even far above or below all curves.
    values += [reference.value for reference in chart.references]
    x_scale = _choose_step_scale(steps, chart.x_range)
    y_scale = choose_scale(values, zero=chart.zero, may_be_log=chart.may_be_log)
    drawing = ChartDrawing()
    # Paths lie on top of those before them: references under the curves, marks over them.
    for reference in chart.references:
        drawing.svg.append(
            draw_path(draw_horizontal_path(y_scale(reference.value)), reference.css_class)
        )
    for series in sampled:
        _draw_series(series, x_scale, y_scale, drawing)
        # One line needs no key: the title names it.
        if len(sampled) > 1:
            drawing.legend.append(
                draw_legend_entry(series.css_class, series.name, series.legend_shape)
            )
        drawing.add_hover_values(series.name, series.css_class, series.xs, series.ys)
    _draw_event_marks(chart.marks, x_scale, y_scale, drawing)
    drawing.end_labels = _build_end_labels(chart, y_scale)
    return draw_figure(chart, x_scale, y_scale, drawing, chart.note, _build_table_of_values(chart))


def _has_finite_value(curves: Sequence[ChartSeries]) -> bool:
    return any(math.isfinite(value) for series in curves for value in series.ys)


def _downsample_series(series: ChartSeries) -> ChartSeries:
    xs, ys = select_extremes(series.xs, series.ys, MAX_LINE_POINTS)
    return replace(series, xs=xs, ys=ys)


def _draw_series(
    series: ChartSeries, x_scale: AxisScale, y_scale: AxisScale, drawing: ChartDrawing
) -> None:
    css_class = series.css_class
    if series.dots:
        css_class = f"thin {css_class}"
    drawing.svg.append(draw_path(_draw_polyline(series.xs, series.ys, x_scale, y_scale), css_class))
    if series.dots and len(series.xs) <= MAX_POINTS_WITH_DOTS:
        for x, y in zip(series.xs, series.ys, strict=True):
            drawing.over.append(_draw_dot(x_scale(x), y_scale(y), series.css_class))


def draw_stack_chart(chart: StackChart) -> Html:
    """Columns down-sampled to `MAX_BAND_COLUMNS`; a column far above the others is cut, and the
    note says so."""
    spans = split_into_buckets(len(chart.xs), MAX_BAND_COLUMNS)
    parts = {
        name: [_compute_mean_of_finite(ys[start:end]) for start, end in spans]
        for name, ys in chart.parts.items()
    }
    totals = [sum(column) for column in zip(*parts.values(), strict=True)]
    if not any(total > 0 for total in totals):
        return draw_empty_chart(chart.title)
    steps = [chart.xs[end - 1] for _, end in spans]
    limit = _compute_cut_height(totals)
    y_scale = choose_scale([min(total, limit) for total in totals], zero=True)
    x_scale = _choose_step_scale([chart.xs[0], chart.xs[-1]], chart.x_range)
    # A column reaches half a step beyond its steps, to either side.
    lefts = [x_scale(chart.xs[start] - 0.5) for start, _ in spans]
    rights = [x_scale(step + 0.5) for step in steps]
    drawing = ChartDrawing()
    drawing.add_hover_values("total", "sum", steps, totals)
    floor = [0.0] * len(spans)
    for name, heights in parts.items():
        # `_mean` lets nothing below zero through.
        if not any(heights):
            continue
        top = [base + height for base, height in zip(floor, heights, strict=True)]
        drawing.svg.append(
            draw_path(_draw_columns_path(lefts, rights, floor, top, y_scale), chart.classes[name])
        )
        drawing.legend.append(draw_legend_entry(chart.classes[name], name, "block"))
        drawing.add_hover_values(name, chart.classes[name], steps, heights)
        floor = top
    note = chart.note
    if math.isfinite(limit):
        note += _describe_cut_columns([each for each in totals if each > y_scale.high], chart.unit)
        _draw_cut_mark(lefts, rights, totals, y_scale, chart.unit, drawing)
    data = _build_table_of_steps(steps, list(parts.items()), chart.unit, chart.title)
    return draw_figure(chart, x_scale, y_scale, drawing, note.strip(), data)


def _compute_usual_column_height(totals: Sequence[float]) -> float:
    """The height that 95 % of the columns do not exceed: a save or a pause is not usual."""
    ordered = sorted(totals)
    return ordered[math.ceil(0.95 * len(ordered)) - 1]


def _compute_cut_height(totals: Sequence[float]) -> float:
    """The height at which columns are cut; infinity if none is more than 3 times the usual one."""
    usual = _compute_usual_column_height(totals)
    if usual > 0 and max(totals) > 3 * usual:
        return 1.6 * usual
    return math.inf


def _describe_cut_columns(cut: Sequence[float], unit: str) -> str:
    subject = f"{len(cut)} columns reach"
    if len(cut) == 1:
        subject = "1 column reaches"
    return f" {subject} past the top, the highest to {_format_value(max(cut), unit)}."


def _draw_cut_mark(
    lefts: Sequence[float],
    rights: Sequence[float],
    totals: Sequence[float],
    y_scale: AxisScale,
    unit: str,
    drawing: ChartDrawing,
) -> None:
    """Put a sign on the top of each column that is higher than the plot."""
    for left_edge, right_edge, total in zip(lefts, rights, totals, strict=True):
        if total > y_scale.high:
            centre = (left_edge + right_edge) / 2
            drawing.over.append(_draw_cross(centre, 1.0, "cut", "▲", _format_value(total, unit)))


def _build_table_of_steps(
    steps: Sequence[float], columns: Sequence[tuple[str, Sequence[float]]], unit: str, title: str
) -> Html:
    rows = []
    for row in _choose_table_rows(len(steps)):
        rows.append(
            [_format_step(steps[row]), *[_format_plain_number(ys[row]) for _, ys in columns]]
        )
    head = ["step", *[_format_name_with_unit(name, unit) for name, _ in columns]]
    return build_table(head, rows, css_class="num", label=title)


def _choose_step_scale(xs: Sequence[float], x_range: tuple[float, float] | None) -> AxisScale:
    return choose_scale([*xs, *(x_range or ())], snug=True)


def _build_table_of_values(chart: LineChart) -> Html:
    """Measured values at evenly spaced steps, and where each line is lowest and highest."""
    lines = [series for series in chart.series if not series.dots]
    parts: list[Html] = []
    if lines:
        # All lines of a chart are columns of the same steps; only dots have steps of their own.
        columns = [(series.name, series.ys) for series in lines]
        parts.append(_build_table_of_steps(lines[0].xs, columns, chart.unit, chart.title))
    for series in chart.series:
        text = _describe_series_values(series, chart.unit)
        if text:
            parts.append(build_tag("p", f"{series.name}: {text}", class_="note"))
    return join_html(parts)


def _describe_series_values(series: ChartSeries, unit: str) -> str:
    """All values of dots, the lowest and the highest of a line; "" if none is finite."""
    finite = [(y, x) for x, y in zip(series.xs, series.ys, strict=True) if math.isfinite(y)]
    if not finite:
        return ""
    if series.dots:
        return "; ".join(_format_value_at_step(y, x, unit) for y, x in finite[:MAX_TABLE_ROWS])
    lowest, highest = (
        _format_value_at_step(*min(finite), unit),
        _format_value_at_step(*max(finite), unit),
    )
    return f"lowest {lowest}, highest {highest}"


def _format_value_at_step(value: float, step: float, unit: str) -> str:
    return f"{_format_value(value, unit)} at step {_format_step(step)}"


def _choose_table_rows(count: int) -> list[int]:
    """At most `MAX_TABLE_ROWS` + 1 row numbers: the first, and the last of each bucket."""
    rows = {end - 1 for _, end in split_into_buckets(count, MAX_TABLE_ROWS)}
    if count:
        rows.add(0)
    return sorted(rows)


# --- marks and labels -----------------------------------------------------------------------------


def _draw_event_marks(
    marks: Sequence[EventMark], x_scale: AxisScale, y_scale: AxisScale, drawing: ChartDrawing
) -> None:
    free_from = free_from_on_narrow_page = -1.0
    for mark in marks[:MAX_EVENT_MARKS]:
        x = x_scale(mark.x)
        if not 0 <= x <= 1:
            continue
        if mark.kind == "skip":
            y = 0.0
            if math.isfinite(mark.y):
                y = y_scale(mark.y)
            # Kept off the plot's edges, where half of the sign would be cut away.
            drawing.over.append(_draw_cross(x, min(max(y, 0.03), 0.97), "skip", "✕", mark.title))
            continue
        drawing.svg.append(draw_path(f"M{x * VIEW_BOX_SIZE:.1f} 0V{VIEW_BOX_SIZE}", mark.kind))
        if x >= free_from:
            css_class = _choose_flag_class(x)
            if x < free_from_on_narrow_page:
                css_class += " crowded"
            else:
                free_from_on_narrow_page = x + NARROW_MARK_LABEL_WIDTH_SHARE
            drawing.over.append(
                build_tag("span", mark.title, class_=css_class, style=f"left:{100 * x:.2f}%")
            )
            free_from = x + MARK_LABEL_WIDTH_SHARE
    kinds = {mark.kind for mark in marks}
    if "skip" in kinds:
        cross = build_tag("b", "✕", class_="skip")
        drawing.legend.append(build_tag("span", cross, "skipped step", class_="key"))
    for kind, name in NAME_OF_LINE_MARK.items():
        if kind in kinds:
            drawing.legend.append(draw_legend_entry(kind, name, "stroke"))


def _choose_flag_class(x: float) -> str:
    """On which side of its mark a text stands: one that begins near the right edge would run over
    it, on a narrow page from the middle on."""
    if x > 0.8:
        return "flag left"
    if x > 0.5:
        return "flag middle"
    return "flag"


def _build_end_labels(chart: LineChart, y_scale: AxisScale) -> list[Html]:
    """Labels right of the plot at the height of what they name, moved apart where they would
    overlap."""
    labels: list[tuple[float, str, str]] = []
    for reference in chart.references:
        labels.append((y_scale(reference.value), reference.label, reference.css_class))
    for series in chart.series:
        last = next((y for y in reversed(series.ys) if math.isfinite(y)), None)
        if series.end_label and last is not None:
            labels.append((y_scale(last), series.end_label, series.css_class))
    # By height, as `_spread_overlapping_labels` takes them.
    labels.sort()
    heights = _spread_overlapping_labels([height for height, _, _ in labels])
    end_labels = []
    for height, (_, text, css_class) in zip(heights, labels, strict=True):
        style = f"bottom:{100 * height:.2f}%"
        # A narrow page cuts it off.
        end_labels.append(
            build_tag("span", text, class_=f"end {css_class}", style=style, title=text)
        )
    return end_labels


def _spread_overlapping_labels(heights: Sequence[float]) -> list[float]:
    """The ascending heights, at least `MIN_LABEL_GAP` from each other and inside the plot."""
    moved: list[float] = []
    lowest = 0.0
    for height in heights:
        moved.append(max(height, lowest))
        lowest = moved[-1] + MIN_LABEL_GAP
    # And back down from the top, if they were pushed over it.
    ceiling = 1.0
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], ceiling)
        ceiling = moved[index] - MIN_LABEL_GAP
    return moved


def _draw_dot(x: float, y: float, css_class: str) -> Html | None:
    if not (math.isfinite(x) and math.isfinite(y)):
        return None
    return build_tag(
        "i", class_=f"dot {css_class}", style=f"left:{100 * x:.2f}%;bottom:{100 * y:.2f}%"
    )


def _draw_cross(x: float, y: float, css_class: str, sign: str, title: str) -> Html:
    style = f"left:{100 * x:.2f}%;bottom:{100 * y:.2f}%"
    return build_tag("b", sign, class_=css_class, style=style, title=title)


# --- paths and numbers ----------------------------------------------------------------------------


def _draw_polyline(
    xs: Sequence[float], ys: Sequence[float], x_scale: AxisScale, y_scale: AxisScale
) -> str:
    """A polyline, lifted over the values that are not numbers."""
    d: list[str] = []
    command = "M"
    for x, y in zip(xs, ys, strict=True):
        # A logarithm has no place for zero, and for less.
        if math.isfinite(y) and not (y_scale.is_log and y <= 0):
            d.append(
                f"{command}{VIEW_BOX_SIZE * x_scale(x):.1f} {VIEW_BOX_SIZE * (1 - y_scale(y)):.1f}"
            )
            command = "L"
        else:
            command = "M"
    return "".join(d)


def _draw_columns_path(
    lefts: Sequence[float],
    rights: Sequence[float],
    floor: Sequence[float],
    top: Sequence[float],
    y_scale: AxisScale,
) -> str:
    d = []
    for left_edge, right_edge, low, high in zip(lefts, rights, floor, top, strict=True):
        start_x, end_x = max(left_edge, 0.0) * VIEW_BOX_SIZE, min(right_edge, 1.0) * VIEW_BOX_SIZE
        y_low, y_high = (
            VIEW_BOX_SIZE * (1 - min(y_scale(low), 1.0)),
            VIEW_BOX_SIZE * (1 - min(y_scale(high), 1.0)),
        )
        # Flat columns are left out: paths of many steps and parts are most of a page's bytes.
        if y_low - y_high > 0.05 and end_x > start_x:
            d.append(f"M{start_x:.1f} {y_low:.1f}V{y_high:.1f}H{end_x:.1f}V{y_low:.1f}Z")
    return "".join(d)


def _compute_mean_of_finite(values: Sequence[float]) -> float:
    """The mean of the finite values, negative ones as 0; 0 without any."""
    finite = [max(value, 0.0) for value in values if math.isfinite(value)]
    if not finite:
        return 0.0
    return sum(finite) / len(finite)


def _format_plain_number(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.5g}"
    return "not a number"


def _format_value(value: float, unit: str) -> str:
    return f"{value:.5g} {unit}".strip()


def _format_step(step: float) -> str:
    return f"{step:.0f}"


def _format_name_with_unit(name: str, unit: str) -> str:
    if unit:
        return f"{name} ({unit})"
    return name
