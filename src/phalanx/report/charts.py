"""Small SVG charts: lines over steps, stacked columns over steps, stacked bars.

The plot stretches with the page (`preserveAspectRatio="none"` and strokes that do not scale); its
text is HTML placed in per cent, so that it keeps its size at any width. Each chart carries its
points for the hover read-out and a table for those who cannot or would rather not look at a
picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.report.markup import Html, join_html, json_island, table, tag
from phalanx.report.sample import buckets, extremes
from phalanx.report.scales import Scale, scale_for, tick_texts, whole_ticks

MAX_POINTS = 1200  # two per pixel column of the plot: more cannot be seen
MAX_COLUMNS = 120
MAX_TABLE_ROWS = 40
MAX_MARKS = 150
MAX_DOTS = 60
MIN_SHARE = 0.002  # of a bar: less is not a pixel; the tables have it
MIN_LABEL_GAP = 0.075  # of the plot's height, so that labels beside it do not overlap

_SIZE = 1000  # of the SVG's own coordinates, both ways


@dataclass(frozen=True)
class Series:
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


@dataclass(frozen=True)
class Reference:
    """A horizontal line to compare with."""

    name: str
    value: float
    label: str
    css_class: str = "ref"


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step: a vertical line ("restart", "resume") or a cross at a
    value ("skip")."""

    kind: str
    x: float
    title: str
    y: float = math.nan


@dataclass(frozen=True)
class LineChart:
    """A figure over steps.

    `unit` follows every value in the read-out; `y_label` names the axis with its unit.
    """

    title: str
    y_label: str
    unit: str
    series: Sequence[Series]
    references: Sequence[Reference] = ()
    marks: Sequence[Mark] = ()
    zero: bool = False
    may_be_log: bool = False
    note: str = ""
    x_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class StackChart:
    """Columns over steps, each the mean of its bucket, stacked in the order of `parts`."""

    title: str
    y_label: str
    unit: str
    xs: Sequence[float]
    parts: Mapping[str, Sequence[float]]
    classes: Mapping[str, str]
    note: str = ""
    x_range: tuple[float, float] | None = None


@dataclass
class _Drawing:
    """The drawn parts of a chart; `_figure` puts axes, notes and a table around them."""

    svg: list[Html] = field(default_factory=list)
    over: list[Html | None] = field(default_factory=list)  # HTML on the plot
    end_labels: list[Html] = field(default_factory=list)  # HTML right of the plot
    legend: list[Html] = field(default_factory=list)


def draw_line_chart(chart: LineChart) -> Html:
    """The chart as a figure; one line of text instead if nothing was measured."""
    if not any(math.isfinite(value) for series in chart.series for value in series.ys):
        return _draw_nothing(chart.title)
    points = [(series, *extremes(series.xs, series.ys, MAX_POINTS)) for series in chart.series]
    x_scale = _x_scale([x for _, xs, _ in points for x in xs], chart.x_range)
    values = [y for _, _, ys in points for y in ys] + [
        reference.value for reference in chart.references
    ]
    y_scale = scale_for(values, zero=chart.zero, may_be_log=chart.may_be_log)
    drawing = _Drawing()
    for reference in chart.references:
        drawing.svg.append(_path(_horizontal(y_scale(reference.value)), reference.css_class))
    for series, xs, ys in points:
        if series.dots:
            drawing.svg.append(_path(_line(xs, ys, x_scale, y_scale), f"thin {series.css_class}"))
        if series.dots and len(xs) <= MAX_DOTS:
            drawing.over += [
                _dot(x_scale(x), y_scale(y), series.css_class) for x, y in zip(xs, ys, strict=True)
            ]
        elif not series.dots:
            drawing.svg.append(_path(_line(xs, ys, x_scale, y_scale), series.css_class))
        if len(points) > 1:  # one line needs no key: the title names it
            drawing.legend.append(_key(series.css_class, series.name, dot=series.dots))
    _draw_marks(chart.marks, x_scale, y_scale, drawing)
    drawing.end_labels = _end_labels(chart, y_scale)
    hover = [
        [series.name, series.css_class, _numbers(xs), _numbers(ys)] for series, xs, ys in points
    ]
    return _figure(
        chart.title,
        chart.y_label,
        chart.unit,
        chart.note,
        x_scale,
        y_scale,
        drawing,
        hover,
        _table(chart),
    )


def draw_stack_chart(chart: StackChart) -> Html:
    """Columns down-sampled to `MAX_COLUMNS`; a column far above the others is cut, and the note
    says so."""
    spans = buckets(len(chart.xs), MAX_COLUMNS)
    parts = {
        name: [_mean(ys[start:end]) for start, end in spans] for name, ys in chart.parts.items()
    }
    totals = [sum(column) for column in zip(*parts.values(), strict=True)]
    if not any(total > 0 for total in totals):
        return _draw_nothing(chart.title)
    ordered = sorted(totals)
    usual = ordered[math.ceil(0.95 * len(ordered)) - 1]
    cut = [total for total in totals if total > 3 * usual] if usual > 0 else []
    y_scale = scale_for([min(total, 1.6 * usual) if cut else total for total in totals], zero=True)
    x_scale = _x_scale([chart.xs[0], chart.xs[-1]], chart.x_range)
    lefts = [x_scale(chart.xs[start] - 0.5) for start, _ in spans]
    rights = [x_scale(chart.xs[end - 1] + 0.5) for _, end in spans]
    drawing = _Drawing()
    floor = [0.0] * len(spans)
    for name, heights in parts.items():
        if not any(height > 0 for height in heights):
            continue
        top = [base + height for base, height in zip(floor, heights, strict=True)]
        drawing.svg.append(_path(_columns(lefts, rights, floor, top, y_scale), chart.classes[name]))
        drawing.legend.append(_key(chart.classes[name], name, block=True))
        floor = top
    note = chart.note
    if cut:
        reach = "1 column reaches" if len(cut) == 1 else f"{len(cut)} columns reach"
        note += f" {reach} past the top, the highest to {_value(max(cut), chart.unit)}."
        for left_edge, right_edge, total in zip(lefts, rights, totals, strict=True):
            if total > y_scale.high:
                drawing.over.append(
                    _cross((left_edge + right_edge) / 2, 1.0, "cut", "▲", _value(total, chart.unit))
                )
    at = [chart.xs[end - 1] for _, end in spans]
    hover: list[list[Any]] = [["total", "sum", _numbers(at), _numbers(totals)]]
    hover += [
        [name, chart.classes[name], _numbers(at), _numbers(ys)]
        for name, ys in parts.items()
        if any(ys)
    ]
    rows = _few_rows(len(at))
    data = table(
        ["step", *[_name_with_unit(name, chart.unit) for name in parts]],
        [[_step_text(at[row]), *[_plain(ys[row]) for ys in parts.values()]] for row in rows],
        css_class="num",
    )
    return _figure(
        chart.title, chart.y_label, chart.unit, note.strip(), x_scale, y_scale, drawing, hover, data
    )


def draw_stacked_bar(
    parts: Mapping[str, float],
    classes: Mapping[str, str],
    full_width: float,
    texts: Mapping[str, str],
) -> Html:
    """A horizontal bar, `full_width` being its full width.

    Each piece is named where it is wide enough, and on hover.
    """
    pieces = []
    for name, value in parts.items():
        share = min(value / full_width, 1.0) if math.isfinite(value) and full_width > 0 else 0.0
        if share < MIN_SHARE:
            continue
        label = name if share * 100 > 1.1 * len(name) + 2 else ""
        style = f"width:{100 * share:.3f}%"
        pieces.append(
            tag(
                "i",
                tag("span", label),
                class_=classes[name],
                style=style,
                title=f"{name}: {texts[name]}",
            )
        )
    label = ", ".join(f"{name} {texts[name]}" for name in parts if parts[name] > 0)
    return tag("div", pieces, class_="bar", role="img", aria_label=label or "nothing")


def draw_legend(names: Sequence[str], classes: Mapping[str, str]) -> Html:
    return tag("div", [_key(classes[name], name, block=True) for name in names], class_="legend")


# --- the frame ------------------------------------------------------------------------------------


def _figure(
    title: str,
    y_label: str,
    unit: str,
    note: str,
    x_scale: Scale,
    y_scale: Scale,
    drawing: _Drawing,
    hover: list[list[Any]],
    data: Html,
) -> Html:
    y_ticks = y_scale.ticks()
    x_ticks = whole_ticks(x_scale.low, x_scale.high, 8) or [round(x_scale.low)]
    grid = [_path(_horizontal(y_scale(tick)), "grid") for tick in y_ticks]
    labels = [
        tag("span", text, class_="ytick", style=f"bottom:{100 * y_scale(tick):.2f}%")
        for tick, text in zip(y_ticks, tick_texts(y_ticks), strict=True)
    ]
    labels += [
        tag("span", text, class_="xtick", style=f"left:{100 * x_scale(tick):.2f}%")
        for tick, text in zip(x_ticks, tick_texts(x_ticks), strict=True)
    ]
    svg = tag(
        "svg",
        grid,
        drawing.svg,
        viewBox=f"0 0 {_SIZE} {_SIZE}",
        preserveAspectRatio="none",
        aria_hidden="true",
        focusable="false",
    )
    island = {
        "unit": unit,
        "log": y_scale.is_log,
        "x": [x_scale.low, x_scale.high],
        "series": hover,
    }
    island["y"] = [y_scale.low, y_scale.high]
    plot = tag(
        "div",
        svg,
        labels,
        drawing.over,
        tag("div", class_="cursor", hidden=True),
        class_="plot",
        tabindex=0,
        role="group",
        aria_label=(
            f"{title}: {y_label} over steps. Use the left and right arrow keys to read values."
        ),
    )
    return tag(
        "figure",
        tag("figcaption", tag("h3", title), tag("div", drawing.legend, class_="legend")),
        tag(
            "div",
            tag("span", y_label + (", log scale" if y_scale.is_log else ""), class_="ylabel"),
            tag("output", class_="readout", aria_live="polite"),
            class_="axis",
        ),
        tag(
            "div",
            plot,
            tag("div", drawing.end_labels, class_="beside") if drawing.end_labels else None,
            class_="row",
        ),
        tag("div", "step", class_="xlabel"),
        tag("p", note, class_="note") if note else None,
        tag("details", tag("summary", "Data table"), data),
        json_island(island, "points"),
        class_="chart wide" if drawing.end_labels else "chart",
    )


def _draw_nothing(title: str) -> Html:
    return tag(
        "figure",
        tag("figcaption", tag("h3", title)),
        tag("p", "Not measured.", class_="note"),
        class_="chart",
    )


def _x_scale(xs: Sequence[float], x_range: tuple[float, float] | None) -> Scale:
    return scale_for([*xs, *(x_range or ())], snug=True)


def _table(chart: LineChart) -> Html:
    """Measured values at evenly spaced steps, and where each line is lowest and highest."""
    lines = [series for series in chart.series if not series.dots]
    parts: list[Html] = []
    if lines:
        xs = lines[0].xs
        head = ["step", *[_name_with_unit(series.name, chart.unit) for series in lines]]
        rows = [
            [_step_text(xs[r]), *[_plain(series.ys[r]) for series in lines]]
            for r in _few_rows(len(xs))
        ]
        parts.append(table(head, rows, css_class="num"))
    for series in chart.series:
        finite = [(y, x) for x, y in zip(series.xs, series.ys, strict=True) if math.isfinite(y)]
        if not finite:
            continue
        if series.dots:
            values = [
                f"{_value(y, chart.unit)} at step {_step_text(x)}"
                for y, x in finite[:MAX_TABLE_ROWS]
            ]
            parts.append(tag("p", f"{series.name}: {'; '.join(values)}", class_="note"))
        else:
            (low, low_x), (high, high_x) = min(finite), max(finite)
            ends = f"lowest {_value(low, chart.unit)} at step {_step_text(low_x)}"
            ends += f", highest {_value(high, chart.unit)} at step {_step_text(high_x)}"
            parts.append(tag("p", f"{series.name}: {ends}", class_="note"))
    return join_html(parts)


def _few_rows(count: int) -> list[int]:
    return sorted(
        {end - 1 for _, end in buckets(count, MAX_TABLE_ROWS)} | ({0} if count else set())
    )


# --- marks and labels -----------------------------------------------------------------------------


def _draw_marks(marks: Sequence[Mark], x_scale: Scale, y_scale: Scale, drawing: _Drawing) -> None:
    free_from = -1.0
    for mark in marks[:MAX_MARKS]:
        x = x_scale(mark.x)
        if not 0 <= x <= 1:
            continue
        if mark.kind == "skip":
            y = y_scale(mark.y) if math.isfinite(mark.y) else 0.0
            drawing.over.append(_cross(x, min(max(y, 0.03), 0.97), "skip", "✕", mark.title))
            continue
        drawing.svg.append(_path(f"M{x * _SIZE:.1f} 0V{_SIZE}", mark.kind))
        if x >= free_from:
            side = "flag left" if x > 0.8 else "flag"
            drawing.over.append(tag("span", mark.title, class_=side, style=f"left:{100 * x:.2f}%"))
            free_from = x + 0.16
    kinds = {mark.kind for mark in marks}
    if "skip" in kinds:
        drawing.legend.append(
            tag("span", tag("b", "✕", class_="skip"), "skipped step", class_="key")
        )
    drawing.legend += [_key(kind, kind) for kind in ("restart", "resume") if kind in kinds]


def _end_labels(chart: LineChart, y_scale: Scale) -> list[Html]:
    """Labels right of the plot at the height of what they name, moved apart where they would
    overlap."""
    labels: list[tuple[float, str, str]] = [
        (y_scale(r.value), r.label, r.css_class) for r in chart.references
    ]
    for series in chart.series:
        last = next((y for y in reversed(series.ys) if math.isfinite(y)), None)
        if series.end_label and last is not None:
            labels.append((y_scale(last), series.end_label, series.css_class))
    labels.sort()
    heights: list[float] = []
    for height, _, _ in labels:
        heights.append(max(height, heights[-1] + MIN_LABEL_GAP if heights else 0.0))
    ceiling = 1.0
    for index in range(
        len(heights) - 1, -1, -1
    ):  # and back down from the top, if they were pushed over it
        heights[index] = min(heights[index], ceiling)
        ceiling = heights[index] - MIN_LABEL_GAP
    return [
        tag("span", text, class_=f"end {css_class}", style=f"bottom:{100 * height:.2f}%")
        for height, (_, text, css_class) in zip(heights, labels, strict=True)
    ]


def _key(css_class: str, name: str, *, dot: bool = False, block: bool = False) -> Html:
    shape = "dot" if dot else "block" if block else "stroke"
    return tag("span", tag("i", class_=f"{shape} {css_class}"), name, class_="key")


def _dot(x: float, y: float, css_class: str) -> Html | None:
    if not (math.isfinite(x) and math.isfinite(y)):
        return None
    return tag("i", class_=f"dot {css_class}", style=f"left:{100 * x:.2f}%;bottom:{100 * y:.2f}%")


def _cross(x: float, y: float, css_class: str, sign: str, title: str) -> Html:
    style = f"left:{100 * x:.2f}%;bottom:{100 * y:.2f}%"
    return tag("b", sign, class_=css_class, style=style, title=title)


# --- paths and numbers ----------------------------------------------------------------------------


def _path(d: str, css_class: str) -> Html:
    return tag("path", d=d, class_=css_class, vector_effect="non-scaling-stroke")


def _horizontal(y: float) -> str:
    return f"M0 {_SIZE * (1 - y):.1f}H{_SIZE}"


def _line(xs: Sequence[float], ys: Sequence[float], x_scale: Scale, y_scale: Scale) -> str:
    """A polyline, lifted over the values that are not numbers."""
    d: list[str] = []
    is_down = False
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(y) and not (y_scale.is_log and y <= 0):
            d.append(
                f"{'L' if is_down else 'M'}{_SIZE * x_scale(x):.1f} {_SIZE * (1 - y_scale(y)):.1f}"
            )
            is_down = True
        else:
            is_down = False
    return "".join(d)


def _columns(
    lefts: Sequence[float],
    rights: Sequence[float],
    floor: Sequence[float],
    top: Sequence[float],
    y_scale: Scale,
) -> str:
    d = []
    for left_edge, right_edge, low, high in zip(lefts, rights, floor, top, strict=True):
        start_x, end_x = max(left_edge, 0.0) * _SIZE, min(right_edge, 1.0) * _SIZE
        y_low, y_high = _SIZE * (1 - min(y_scale(low), 1.0)), _SIZE * (1 - min(y_scale(high), 1.0))
        if y_low - y_high > 0.05 and end_x > start_x:
            d.append(f"M{start_x:.1f} {y_low:.1f}V{y_high:.1f}H{end_x:.1f}V{y_low:.1f}Z")
    return "".join(d)


def _mean(values: Sequence[float]) -> float:
    finite = [max(value, 0.0) for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else 0.0


def _numbers(values: Sequence[float]) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _plain(value: float) -> str:
    return f"{value:.5g}" if math.isfinite(value) else "not a number"


def _value(value: float, unit: str) -> str:
    return f"{value:.5g} {unit}".strip()


def _step_text(step: float) -> str:
    return f"{step:.0f}"


def _name_with_unit(name: str, unit: str) -> str:
    return f"{name} ({unit})" if unit else name
