"""A bar of stacked parts, for a row of a table or a section of a page."""

from __future__ import annotations

import math
from collections.abc import Mapping

from phalanx.report.markup import Html, build_tag

# Of a bar: less is not a pixel; the tables have it.
MIN_SHOWN_SHARE = 0.002


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
        share = 0.0
        if math.isfinite(value) and full_width > 0:
            share = min(value / full_width, 1.0)
        if share < MIN_SHOWN_SHARE:
            continue
        label = ""
        # A letter of the label is about 1.1 % of the bar wide, its padding 2 %.
        if share * 100 > 1.1 * len(name) + 2:
            label = name
        pieces.append(
            build_tag(
                "i",
                build_tag("span", label),
                class_=classes[name],
                style=f"width:{100 * share:.3f}%",
                title=f"{name}: {texts[name]}",
            )
        )
    label = ", ".join(f"{name} {texts[name]}" for name in parts if parts[name] > 0)
    return build_tag("div", pieces, class_="bar", role="img", aria_label=label or "nothing")
