"""The time of a planned step as a waterfall, and its pipeline as a timeline."""

from __future__ import annotations

from phalanx.report import formats
from phalanx.report.markup import Html, build_note, build_table, build_tag
from phalanx.report.pipeline_chart import draw_timeline_chart
from phalanx.report.plan_facts import PlanPageFacts

# Of the whole: below, a bar is a hairline.
MIN_BAR_PERCENT = 0.25
_CSS_CLASS_OF_TERM = {
    "ideal": "g4",
    "matmul loss": "g1",
    "attention": "g0",
    "elementwise": "g10",
    "tp": "g3",
    "cp": "g3",
    "ep": "g3",
    "bubble": "g2",
    "dp exposed": "g3",
    "optimizer": "g5",
    "offload": "g7",
    "launch": "g7",
    "jitter": "g8",
    "goodput": "g9",
}


def render_waterfall(facts: PlanPageFacts) -> Html | None:
    """The section of the step's time; None where it is not predicted."""
    if not facts.waterfall:
        return None
    end_s = max(row.start_s + row.seconds for row in facts.waterfall)
    lines: list[Html] = []
    for row in facts.waterfall:
        left_edge = 100 * row.start_s / end_s
        width = max(100 * row.seconds / end_s, MIN_BAR_PERCENT)
        bar = build_tag(
            "i",
            class_=_CSS_CLASS_OF_TERM.get(row.term, "g8"),
            style=f"left:{min(left_edge, 100 - MIN_BAR_PERCENT):.3f}%;width:{width:.3f}%",
        )
        took = formats.format_milliseconds(row.seconds)
        lines += [
            build_tag("span", row.name, class_="fallname"),
            build_tag(
                "div", bar, class_="fall", title=row.meaning, role="img", aria_label=row.name
            ),
            build_tag("span", took, class_="fallvalue"),
            build_tag("span", formats.format_percent(row.share, 1.0), class_="fallvalue"),
        ]
    rows = [
        [
            row.name,
            formats.format_milliseconds(row.seconds),
            formats.format_percent(row.share, 1.0),
            build_tag("div", row.meaning, class_="words"),
        ]
        for row in facts.waterfall
    ]
    table = build_table(["term", "time", "of the step", "what it is"], rows)
    return build_tag(
        "section",
        build_tag("h2", "Where the step's time goes"),
        build_tag("div", lines, class_="falls"),
        build_note(
            "Each bar begins where the one before it ends. phalanx plan --explain TERM prints the"
            " formula of a term with its numbers."
        ),
        build_tag("details", build_tag("summary", "What the terms are"), table),
        id="time",
    )


def render_planned_pipeline(facts: PlanPageFacts) -> Html | None:
    """The section of the pipeline; None without one."""
    if facts.timeline is None:
        return None
    return build_tag(
        "section",
        build_tag("h2", "The pipeline"),
        draw_timeline_chart(facts.timeline, title="One step, simulated", in_seconds=False),
        build_note(_compare_idle_with_bubble(facts, float(facts.timeline.bubble))),
        id="pipeline",
    )


def _compare_idle_with_bubble(facts: PlanPageFacts, idle: float) -> str:
    """What ranks' idle time is a part of, and why the step's bubble is another number."""
    text = (
        "Idle time is a part of what is drawn: the microbatches alone, with messages between ranks"
        " that take no time."
    )
    shares = [row.share for row in facts.waterfall if row.term == "bubble"]
    if not shares:
        return text
    return (
        f"{text} So it is {formats.format_percent(idle, 1.0)} here, and the pipeline bubble under"
        f" Time is {formats.format_percent(shares[0], 1.0)}: a part of the whole step, in which"
        " those messages, the optimizer and data parallelism take time, too."
    )
