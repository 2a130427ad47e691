"""Rows of coloured cells, for maps of many values: one path for each colour."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.report.markup import Html, build_tag

MAX_SEPARATE_CELLS = 64
"""Cells of a row that are drawn apart; of more, neighbours of one colour are one shape."""


def draw_heat_cells(
    levels: Sequence[int | None], label: str, *, num_cells: int, height_px: int
) -> Html:
    """One row of cells as an image that `label` describes; cell i has the colour class
    h0 to h7 of its level, those of None and beyond the levels are empty."""
    is_few = num_cells <= MAX_SEPARATE_CELLS
    paths: dict[int, str] = {}
    start = 0
    # One beyond the last cell, where the last run ends.
    for end in range(1, len(levels) + 1):
        if end == len(levels) or levels[end] != levels[start] or is_few:
            level = levels[start]
            if level is not None:
                shape = f"M{start} 0h{end - start}v1h{start - end}z"
                paths[level] = paths.get(level, "") + shape
            start = end
    css_class = None
    if is_few:
        css_class = "few"
    return build_tag(
        "svg",
        [build_tag("path", d=d, class_=f"h{level}") for level, d in sorted(paths.items())],
        viewBox=f"0 0 {num_cells} 1",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
        style=f"height:{height_px}px",
        class_=css_class,
    )


def draw_heat_axis(texts: Sequence[str], right: str) -> list[Html]:
    """The labels under a map, `texts[i]` under cell i ("" for none), and what its right column
    is."""
    ticks = []
    for index, text in enumerate(texts):
        if text:
            style = f"left:{100 * (index + 0.5) / len(texts):.3f}%"
            ticks.append(build_tag("span", text, style=style))
    return [
        build_tag("span"),
        build_tag("div", ticks, class_="heataxis"),
        build_tag("span", right, class_="heatend"),
    ]
