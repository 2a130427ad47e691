"""The memory of a plan: a bar for each phase of a step, and for each rank of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.plan.advice.waterfall import list_memory_phases
from phalanx.report import formats
from phalanx.report.figure import draw_legend
from phalanx.report.markup import Html, build_note, build_table, build_tag
from phalanx.report.plan_facts import PlanPageFacts
from phalanx.report.sections.memory import (
    choose_css_classes_by_category,
    draw_memory_bar,
    list_memory_categories,
)

MAX_SHOWN_STAGES = 32


def render_planned_memory(facts: PlanPageFacts) -> Html | None:
    """The section of memory; None where it is not predicted."""
    if not facts.memory:
        return None
    phases = list_memory_phases(facts.memory, facts.memory_phases)
    names = list_memory_categories(facts.memory, *phases.values(), *facts.stage_memory)
    names = [name for name in names if _has_category_bytes(name, facts)]
    colour = choose_css_classes_by_category(names)
    by_phase = _render_memory_bars(list(phases.items()), facts.capacity_bytes, colour, "phase")
    stages = [(f"rank {rank}", parts) for rank, parts in enumerate(facts.stage_memory)]
    by_stage = None
    if len(stages) > 1:
        by_stage = build_tag(
            "div",
            build_tag("h3", "By rank of the pipeline, at its peak"),
            _render_memory_bars(stages[:MAX_SHOWN_STAGES], facts.capacity_bytes, colour, "rank"),
            _build_left_out_ranks_note(len(stages)),
            class_="block",
        )
    return build_tag(
        "section",
        build_tag("h2", "Where a rank's memory goes"),
        draw_legend(names, colour),
        build_tag("div", build_tag("h3", "By phase, on the rank that needs most"), by_phase),
        by_stage,
        build_note(
            f"Bars are as wide as the {formats.format_num_bytes(facts.capacity_bytes)} that a rank"
            " may fill, or as the longest of them, where one is longer."
        ),
        id="memory",
    )


def _has_category_bytes(name: str, facts: PlanPageFacts) -> bool:
    everywhere = (facts.memory, *facts.memory_phases.values(), *facts.stage_memory)
    return any(parts.get(name) for parts in everywhere)


def _render_memory_bars(
    bars: Sequence[tuple[str, Mapping[str, float]]],
    capacity_bytes: float,
    colour: dict[str, str],
    noun: str,
) -> Html:
    full_bytes = max(capacity_bytes, *(sum(parts.values()) for _, parts in bars))
    rows: list[list[Html | str]] = []
    for name, parts in bars:
        total = sum(parts.values())
        css_class = None
        if capacity_bytes and total > capacity_bytes:
            css_class = "over"
        rows.append(
            [
                name,
                draw_memory_bar(dict(parts), full_bytes, colour),
                build_tag("span", formats.format_num_bytes(total), class_=css_class),
                formats.format_percent(total, capacity_bytes),
            ]
        )
    head = [noun, "by category", "in all", "of what it may fill"]
    return build_table(head, rows, css_class="top bars")


def _build_left_out_ranks_note(num_stages: int) -> Html | None:
    if num_stages <= MAX_SHOWN_STAGES:
        return None
    return build_note(f"The first {MAX_SHOWN_STAGES} of {num_stages} ranks are shown.")
