"""Lanes under a chart over steps: what happened, on the same axis as the curve above."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.report.markup import Html, build_note, build_table, build_tag
from phalanx.report.scales import AxisScale

MAX_MARKS_OF_LANE = 200
MAX_ROWS_OF_TABLE = 300


@dataclass(frozen=True)
class LaneMark:
    """Something that happened at `step`: a `sign` and, for those who hear or hover, `text`.

    `css_class`: "bad", "warn" or "calm"; `link` leads to the event itself.
    """

    step: float
    sign: str
    text: str
    css_class: str
    link: Html | None = None


@dataclass(frozen=True)
class Lane:
    """One row: its short name, and its marks in any order."""

    name: str
    marks: Sequence[LaneMark]


def draw_lanes(title: str, lanes: Sequence[Lane], scale: AxisScale) -> Html | None:
    """The lanes that have marks as a figure with a table; None if none has any.

    `scale` is that of the chart above, whose frame this one repeats.
    """
    used = [lane for lane in lanes if lane.marks]
    if not used:
        return None
    is_cut = any(len(lane.marks) > MAX_MARKS_OF_LANE for lane in used)
    note = ""
    if is_cut:
        note = f"Of a lane with more than {MAX_MARKS_OF_LANE} marks some are drawn, evenly taken."
    return build_tag(
        "figure",
        build_tag("figcaption", build_tag("h3", title)),
        [_draw_lane(lane, scale) for lane in used],
        build_note(note),
        build_tag("details", build_tag("summary", "Data table"), _build_lane_table(used)),
        class_="chart lanefigure",
    )


def _draw_lane(lane: Lane, scale: AxisScale) -> Html:
    marks = []
    for mark in _take_evenly(lane.marks, MAX_MARKS_OF_LANE):
        x_share = scale(mark.step)
        if 0 <= x_share <= 1:
            # Kept off the edges, where half of a sign would be cut away.
            style = f"left:{100 * min(max(x_share, 0.004), 0.996):.2f}%"
            marks.append(
                build_tag("b", mark.sign, class_=mark.css_class, style=style, title=mark.text)
            )
    label = f"{lane.name}: {len(lane.marks)} in the table below"
    return build_tag(
        "div",
        build_tag("span", lane.name, class_="lanelabel"),
        build_tag("div", marks, class_="eventlane", role="img", aria_label=label),
        build_tag("div", str(len(lane.marks)), class_="beside"),
        class_="row lanerow",
    )


def _take_evenly(marks: Sequence[LaneMark], most: int) -> list[LaneMark]:
    if len(marks) <= most:
        return list(marks)
    return [marks[index * len(marks) // most] for index in range(most)]


def _build_lane_table(lanes: Sequence[Lane]) -> Html:
    rows = []
    everything = [(mark.step, lane.name, mark) for lane in lanes for mark in lane.marks]
    everything.sort(key=lambda item: item[0])
    for step, name, mark in everything[:MAX_ROWS_OF_TABLE]:
        rows.append([f"{step:,.0f}", name, [mark.text, " ", mark.link]])
    caption = ""
    if len(everything) > len(rows):
        caption = f"The first {len(rows)} of {len(everything):,}."
    return build_table(["step", "", "what"], rows, caption=caption, label="What happened")
