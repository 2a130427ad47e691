"""The head of a plan's page: what is asked, and the answer in a line and a few numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from phalanx.report import formats
from phalanx.report.markup import Html, build_note, build_small_text, build_table, build_tag
from phalanx.report.plan_facts import AnswerTile, LayoutRow, PlanPageFacts
from phalanx.report.sections.memory import choose_css_classes_by_category, draw_memory_bar


def render_plan_header(facts: PlanPageFacts) -> Html:
    """Title, verdict and the numbers of the answer."""
    status, css_class = "does not fit", "status bad"
    if facts.fits:
        status, css_class = "fits", "status finished"
    return build_tag(
        "header",
        build_tag(
            "div",
            build_tag("h1", f"{facts.model} on {facts.cluster}"),
            build_tag("span", status, class_=css_class),
            class_="name",
        ),
        build_tag("p", facts.verdict, class_="when"),
        build_tag("dl", [_render_tile(tile) for tile in facts.tiles], class_="keys"),
    )


def _render_tile(tile: AnswerTile) -> Html:
    value = build_tag("dd", tile.value, build_small_text(tile.detail))
    return build_tag("div", build_tag("dt", tile.name), value)


def render_ranking(facts: PlanPageFacts) -> Html | None:
    """The winner and the runners-up, with what each loses by."""
    if not facts.layouts:
        return None
    return build_tag(
        "section",
        build_tag("h2", "Winner and runners-up"),
        _render_layout_table(facts.layouts),
        build_note(_describe_ranking(facts.layouts)),
        id="ranking",
    )


def _describe_ranking(rows: Sequence[LayoutRow]) -> str:
    if not any(math.isfinite(row.step_s) for row in rows):
        return (
            "One layout of each family, the one with the fewest mechanisms first: no time of a step"
            " is predicted."
        )
    return (
        "One layout of each family. Step times are predictions of one model: where they are"
        " nearly equal, the layout with the fewest mechanisms wins."
    )


def render_nearest_fits(facts: PlanPageFacts) -> Html | None:
    """The table of layouts that would fit, where nothing does as asked."""
    if not facts.nearest:
        return None
    return build_tag(
        "section",
        build_tag("h2", "The nearest that fits"),
        _render_layout_table(facts.nearest),
        id="nearest",
    )


def _render_layout_table(rows: Sequence[LayoutRow]) -> Html:
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row.parts)
    colour = choose_css_classes_by_category(names)
    full_bytes = max((row.peak_bytes for row in rows if math.isfinite(row.peak_bytes)), default=0.0)
    best_s = rows[0].step_s
    head = ["", "layout", "step", "peak memory", "", "why"]
    return build_table(
        head, [_render_layout_row(row, full_bytes, colour, best_s) for row in rows], css_class="top"
    )


def _render_layout_row(
    row: LayoutRow, full_bytes: float, colour: dict[str, str], best_s: float
) -> list[Html | str]:
    css_class, relative = None, ""
    if row.is_winner:
        css_class = "chosen"
    elif math.isfinite(row.step_s) and best_s > 0:
        relative = f"{100 * (row.step_s / best_s - 1):+.1f} %"
    step = "not predicted"
    if math.isfinite(row.step_s):
        step = formats.format_seconds_or_missing(row.step_s)
    bar: Html | str = ""
    if row.parts:
        bar = draw_memory_bar(dict(row.parts), full_bytes, colour)
    family = f"{row.number} · {row.family}" if row.number else row.family
    return [
        build_tag("span", family, class_=css_class),
        build_tag("span", row.layout, build_small_text(row.settings), class_="two wraps"),
        build_tag(
            "span",
            step,
            build_small_text(relative),
            class_="two nw",
        ),
        formats.format_num_bytes(row.peak_bytes),
        bar,
        build_tag("div", row.why or "–", class_="words"),
    ]


def render_refused_layouts(facts: PlanPageFacts) -> Html | None:
    """Why the other layouts were refused, with counts."""
    if not facts.refused:
        return None
    rows = []
    for reason, count in sorted(facts.refused.items(), key=lambda item: -item[1]):
        rows.append([build_tag("div", reason, class_="words"), f"{count:,}"])
    return build_tag(
        "section",
        build_tag("h2", "Why not another"),
        build_table(["refused because", "layouts"], rows, css_class="num"),
        id="refused",
    )
