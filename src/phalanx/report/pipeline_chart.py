"""A pipeline's step as a picture: a row per rank, what it does when, and where it waits; planned
above measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.core.units import plural
from phalanx.plan.pipeline.schedule import NAME_OF_ACTION_KIND, Action, ActionKind
from phalanx.plan.pipeline.simulate import Timeline, count_peak_in_flight
from phalanx.report import formats
from phalanx.report.figure import draw_legend
from phalanx.report.markup import Html, build_note, build_small_text, build_table, build_tag
from phalanx.report.scales import choose_linear_ticks, format_ticks

MAX_DRAWN_RANKS = 16
# Actions with a text to hover over: more would make the page megabytes longer.
MAX_ACTIONS_WITH_TEXT = 1500
MAX_BOXES_PER_RANK = 600  # of one rank: two pixels each
MAX_BINNED_COLUMNS = 150  # where there are more than that
MIN_LABEL_SHARE = 0.011  # of the step: narrower boxes have no room for a number

_WIDTH, _HEIGHT = 10_000, 100  # of the SVG's own coordinates
_CSS_CLASS_OF_KIND: dict[ActionKind, str] = {"F": "pf", "B": "pb", "I": "pi", "W": "pw"}
_TIME_UNITS = (
    (1.0, "seconds of the step"),
    (1e3, "milliseconds of the step"),
    (1e6, "microseconds of the step"),
)


@dataclass(frozen=True)
class _ActionBox:
    """An action on the chart, from `start` to `end` of 0 to 1.

    `is_late`: of a rank's second or later stage.
    """

    action: Action
    start: float
    end: float
    is_late: bool


def draw_timeline_chart(
    timeline: Timeline,
    measured: Timeline | None = None,
    title: str = "Pipeline",
    *,
    in_seconds: bool = True,
) -> Html:
    """The figure.

    `measured` has the same ranks and stands under the plan, on the same scale of time.

    Without `in_seconds` times are shown as parts of the step: nothing has said how fast anything
    is.
    """
    lanes = {"planned": timeline}
    if measured is not None:
        lanes["measured"] = measured
    whole_s = max(float(lane.step_s) for lane in lanes.values())
    if not whole_s > 0:
        heading = build_tag("figcaption", build_tag("h3", title))
        return build_tag("figure", heading, build_note("Not measured."))
    ranks = _choose_drawn_ranks(timeline.schedule.num_ranks)
    rows: list[Html] = []
    for rank in ranks:
        for name, lane in lanes.items():
            # There is nothing to tell it from.
            if len(lanes) == 1:
                name = ""
            rows += _draw_rank_row(name, lane, rank, whole_s, in_seconds)
    classes = _map_legend_to_css_classes(lanes)
    unit, axis = "% of the step", _draw_time_ticks(100.0)
    if in_seconds:
        unit, axis = _draw_time_axis(whole_s)
    return build_tag(
        "figure",
        build_tag("figcaption", build_tag("h3", title), draw_legend(list(classes), classes)),
        build_tag("div", rows, build_tag("span"), axis, build_tag("span"), class_="lanes"),
        build_tag("div", f"{unit}, from its first action", class_="xlabel"),
        build_tag("p", _describe_chart(lanes, ranks, in_seconds), class_="note"),
        build_tag(
            "details",
            build_tag("summary", "Data table"),
            _build_action_table(lanes, whole_s, in_seconds),
        ),
        class_="chart",
    )


def _map_legend_to_css_classes(lanes: dict[str, Timeline]) -> dict[str, str]:
    """The colour of each kind of action that the lanes have, and of waiting."""
    kinds: set[ActionKind] = set()
    for lane in lanes.values():
        for row in lane.schedule.actions:
            kinds.update(action.kind for action in row)
    classes = {
        text: _CSS_CLASS_OF_KIND[kind]
        for kind, text in NAME_OF_ACTION_KIND.items()
        if kind in kinds
    }
    return classes | {"idle": "pidle"}


def _choose_drawn_ranks(num_ranks: int) -> list[int]:
    """All, or the first and the last."""
    if num_ranks <= MAX_DRAWN_RANKS:
        return list(range(num_ranks))
    half = MAX_DRAWN_RANKS // 2
    return [*range(half), *range(num_ranks - half, num_ranks)]


def _draw_rank_row(
    name: str, timeline: Timeline, rank: int, whole_s: float, in_seconds: bool
) -> list[Html]:
    """Name, lane and idle share of one rank.

    A rank's second row, the measured one, does not say the rank again.
    """
    boxes = list(_list_action_boxes(timeline, rank, whole_s))
    paths = (
        _draw_rectangles(boxes) if len(boxes) <= MAX_BOXES_PER_RANK else _draw_binned_columns(boxes)
    )
    drawn = [build_tag("path", d=d, class_=css_class) for css_class, d in paths.items()]
    size = f"0 0 {_WIDTH} {_HEIGHT}"
    svg = build_tag(
        "svg",
        drawn,
        viewBox=size,
        preserveAspectRatio="none",
        aria_hidden="true",
        focusable="false",
    )
    labels = []
    if _are_actions_named(timeline):
        labels = [_draw_box_label(box, whole_s, in_seconds) for box in boxes]
    idle = formats.format_percent(float(timeline.bubble_of_rank(rank)), 1.0)
    label = f"rank {rank}: idle {idle}"
    if name:
        label = f"rank {rank}, {name}: idle {idle}"
    heading, css_class = f"rank {rank}", "lane"
    if name == "measured":
        heading, css_class = "", "lane second"
    return [
        build_tag("span", heading, build_small_text(name), class_="lanename"),
        build_tag("div", svg, labels, class_=css_class, role="img", aria_label=label),
        build_tag("span", f"{idle} idle", class_="laneidle"),
    ]


def _are_actions_named(timeline: Timeline) -> bool:
    return sum(map(len, timeline.spans_s)) <= MAX_ACTIONS_WITH_TEXT


def _list_action_boxes(timeline: Timeline, rank: int, whole_s: float) -> Iterator[_ActionBox]:
    # In ascending order: all but the first are drawn paler.
    stages = timeline.schedule.stages_of_rank(rank)
    for action, (start_s, end_s) in zip(
        timeline.schedule.actions[rank], timeline.spans_s[rank], strict=True
    ):
        yield _ActionBox(
            action, float(start_s) / whole_s, float(end_s) / whole_s, action.stage != stages[0]
        )


def _get_css_class_of_action(box: _ActionBox) -> str:
    css_class = _CSS_CLASS_OF_KIND[box.action.kind]
    if box.is_late:
        css_class += " late"
    return css_class


def _draw_rectangles(boxes: list[_ActionBox]) -> dict[str, str]:
    """One path for each colour."""
    paths: dict[str, str] = {}
    for box in boxes:
        start_x, end_x = f"{box.start * _WIDTH:.0f}", f"{box.end * _WIDTH:.0f}"
        rectangle = f"M{start_x} 0H{end_x}V{_HEIGHT}H{start_x}Z"
        paths[_get_css_class_of_action(box)] = (
            paths.get(_get_css_class_of_action(box), "") + rectangle
        )
    return paths


def _draw_binned_columns(boxes: list[_ActionBox]) -> dict[str, str]:
    """Too many boxes to see: columns, in which each colour is as high as its share of that time."""
    shares: dict[str, list[float]] = {}
    for box in boxes:
        column = shares.setdefault(_get_css_class_of_action(box), [0.0] * MAX_BINNED_COLUMNS)
        start, end = box.start * MAX_BINNED_COLUMNS, box.end * MAX_BINNED_COLUMNS
        for index in range(int(start), min(MAX_BINNED_COLUMNS, int(end) + 1)):
            covered = min(end, index + 1) - max(start, index)
            # A box that ends on a border covers nothing of the next column.
            column[index] += max(0.0, covered)
    paths = dict.fromkeys(shares, "")
    floor = [0.0] * MAX_BINNED_COLUMNS
    for css_class, column in shares.items():
        for index, share in enumerate(column):
            low, high = _HEIGHT * (1 - floor[index]), _HEIGHT * (1 - min(1.0, floor[index] + share))
            left_edge = index * _WIDTH // MAX_BINNED_COLUMNS
            right_edge = (index + 1) * _WIDTH // MAX_BINNED_COLUMNS
            # Of the 100 that a lane is high: less is not a pixel.
            if low - high > 0.5:
                paths[css_class] += f"M{left_edge} {low:.0f}V{high:.0f}H{right_edge}V{low:.0f}Z"
            floor[index] += share
    return paths


def _format_duration(seconds: float, whole_s: float, in_seconds: bool) -> str:
    if in_seconds:
        return formats.format_milliseconds(seconds)
    return formats.format_percent(seconds, whole_s)


def _draw_box_label(box: _ActionBox, whole_s: float, in_seconds: bool) -> Html:
    """Its microbatch where there is room; everything on hover."""
    action, width = box.action, box.end - box.start
    text = str(action.microbatch)
    # Two digits have room in MIN_LABEL_SHARE; longer numbers need more.
    if not width >= MIN_LABEL_SHARE * max(1.0, len(text) / 2):
        text = ""
    took = _format_duration(width * whole_s, whole_s, in_seconds)
    hover = (
        f"{action}: {NAME_OF_ACTION_KIND[action.kind]} of microbatch {action.microbatch} in stage"
        f" {action.stage}, {took}"
    )
    return build_tag(
        "i", text, style=f"left:{100 * box.start:.3f}%;width:{100 * width:.3f}%", title=hover
    )


def _draw_time_axis(whole_s: float) -> tuple[str, Html]:
    """(unit, the ticks under the lanes)."""
    # The largest unit of which a step has at least two.
    for factor, unit in _TIME_UNITS:
        if whole_s * factor >= 2:
            return unit, _draw_time_ticks(whole_s * factor)
    factor, unit = _TIME_UNITS[-1]
    return unit, _draw_time_ticks(whole_s * factor)


def _draw_time_ticks(full_width: float) -> Html:
    ticks = choose_linear_ticks(0.0, full_width, 8)
    marks = [
        build_tag("span", text, class_="xtick", style=f"left:{100 * tick / full_width:.2f}%")
        for tick, text in zip(ticks, format_ticks(ticks), strict=True)
    ]
    return build_tag("div", marks, class_="laneaxis")


def _describe_chart(lanes: dict[str, Timeline], ranks: list[int], in_seconds: bool) -> str:
    schedule = lanes["planned"].schedule
    microbatches = plural(schedule.num_microbatches, "microbatch", "microbatches")
    sentences = [f"{schedule.name}, {microbatches}."]
    for name, lane in lanes.items():
        text = f"idle {formats.format_percent(float(lane.bubble), 1.0)}"
        if in_seconds:
            text = f"{formats.format_seconds_or_missing(float(lane.step_s))}, {text}"
        sentences.append(f"{name.capitalize()}: {text}.")
    if any(len(schedule.stages_of_rank(rank)) > 1 for rank in ranks):
        sentences.append("Paler: a rank's later stages.")
    if all(_are_actions_named(lane) for lane in lanes.values()):
        sentences.append("Numbers are microbatches.")
    most_boxes = max(max(map(len, lane.spans_s)) for lane in lanes.values())
    if most_boxes > MAX_BOXES_PER_RANK:
        sentences.append("Colours are as high as their share of the time.")
    if len(ranks) < schedule.num_ranks:
        half = MAX_DRAWN_RANKS // 2
        sentences.append(f"Ranks {half} to {schedule.num_ranks - half - 1} are left out.")
    return " ".join(sentences)


def _build_action_table(lanes: dict[str, Timeline], whole_s: float, in_seconds: bool) -> Html:
    schedule = lanes["planned"].schedule
    in_flight_per_rank = count_peak_in_flight(schedule).per_rank
    rows = []
    for rank in _choose_drawn_ranks(schedule.num_ranks):
        busy, idle = [], []
        for lane in lanes.values():
            busy.append(_format_duration(float(lane.busy_s(rank)), whole_s, in_seconds))
            idle.append(formats.format_percent(float(lane.bubble_of_rank(rank)), 1.0))
        stages = ", ".join(map(str, schedule.stages_of_rank(rank)))
        rows.append([str(rank), stages, *busy, *idle, str(in_flight_per_rank[rank])])
    head = [
        "rank",
        "stages",
        *[f"busy, {name}" for name in lanes],
        *[f"idle, {name}" for name in lanes],
        "microbatches held at most",
    ]
    return build_table(head, rows, css_class="num")
