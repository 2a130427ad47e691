"""The experts of a run: who got how many tokens in the last step that was logged, and how even
that was before."""

from __future__ import annotations

import math
from collections.abc import Sequence

from phalanx.core.units import plural
from phalanx.report import formats
from phalanx.report.charts import ChartSeries, LineChart, ReferenceLine, draw_line_chart
from phalanx.report.expert_facts import ExpertFacts, compute_max_over_mean_load
from phalanx.report.facts import RunFacts
from phalanx.report.figure import draw_legend
from phalanx.report.heat import draw_heat_axis, draw_heat_cells
from phalanx.report.markup import Html, build_table, build_tag
from phalanx.report.sections.curves import find_step_range, list_restart_marks

MAX_LAYERS, MAX_EXPERTS = 160, 1024
ROW_PX, FEW_PX = 16, 26  # height of a layer's row, and where there are few layers

# By share of the even load, from none to far too much; below even is blue, above is orange, about
# even is pale.
LOAD_LEVELS = (
    (0.0, "nothing"),
    (0.25, "up to 1/4"),
    (0.5, "to 1/2"),
    (0.8, "to 0.8"),
    (1.25, "about even"),
    (2.0, "to 2 times"),
    (4.0, "to 4 times"),
    (math.inf, "more"),
)


def has_experts(facts: RunFacts) -> bool:
    return facts.experts.has_expert_steps


def render_experts(facts: RunFacts) -> Html | None:
    """The section; None for a run without experts, or before any were counted."""
    if not has_experts(facts):
        return None
    experts = facts.experts
    charts = _draw_busiest_expert_chart(facts, alone=True)
    if any(share > 0 for share in experts.dropped_share):
        worst = _draw_busiest_expert_chart(facts, alone=False)
        charts = build_tag("div", worst, _draw_dropped_chart(facts), class_="pair")
    return build_tag(
        "section",
        build_tag("h2", "Experts"),
        build_tag("p", _describe_balance(experts)),
        draw_heat_map(experts),
        charts,
        id="experts",
    )


def _describe_balance(experts: ExpertFacts) -> str:
    over = {name: compute_max_over_mean_load(tokens) for name, tokens in experts.tokens.items()}
    name = max(over, key=lambda layer: over[layer])
    busiest = experts.tokens[name].index(max(experts.tokens[name]))
    idle = sum(tokens.count(0) for tokens in experts.tokens.values())
    sentence = (
        f"At step {experts.step:,} the busiest is expert {busiest} of {name}, with {over[name]:.2f}"
        " times the mean."
    )
    if idle:
        sentence += f" {plural(idle, 'expert')} got nothing."
    share = experts.newest_dropped_share
    if share > 0:
        sentence += f" {100 * share:.2g} % of the choices were dropped: their experts were full."
    # A number stays on the line of its sign.
    return sentence.replace(" %", "\u00a0%")


def draw_heat_map(experts: ExpertFacts) -> Html:
    """A row for each layer, a column for each expert, coloured by its share of the even load."""
    layers = list(experts.tokens.items())[:MAX_LAYERS]
    columns = min(max(len(tokens) for _, tokens in layers), MAX_EXPERTS)
    height = FEW_PX
    if len(layers) > 12:
        height = ROW_PX
    rows = [
        _draw_layer_row(name, tokens[:columns], experts.dropped.get(name, 0), columns, height)
        for name, tokens in layers
    ]
    # At most 16 numbers on the axis: MAX_EXPERTS has every 64th.
    step = next(size for size in (1, 2, 4, 8, 16, 32, 64, 128) if columns / size <= 16)
    texts = [str(number) if number % step == 0 else "" for number in range(columns)]
    axis = draw_heat_axis(texts, "max / mean")
    names = [name for _, name in LOAD_LEVELS]
    note = (
        "Colour: tokens of an expert over the mean of its layer, in one step over all ranks."
        " Across: the experts."
    )
    most_experts = max(map(len, experts.tokens.values()))
    if len(experts.tokens) > len(layers) or most_experts > columns:
        note += f" The first {len(layers)} layers and {columns} experts are shown."
    classes = {name: f"h{level}" for level, name in enumerate(names)}
    return build_tag(
        "figure",
        build_tag(
            "figcaption",
            build_tag("h3", f"Load of each expert, step {experts.step:,}"),
            draw_legend(names, classes),
        ),
        build_tag("div", rows, axis, class_="heat"),
        build_tag("p", note, class_="note"),
        build_tag(
            "details", build_tag("summary", "Data table"), _build_load_table(layers, experts)
        ),
        class_="chart",
    )


def choose_heat_level(tokens: float, mean: float) -> int:
    """The number of the first of `MAX_QUANTISED_LEVEL` that holds it."""
    share = 0.0
    if mean > 0:
        share = tokens / mean
    return next(level for level, (most, _) in enumerate(LOAD_LEVELS) if share <= most)


def _draw_layer_row(
    name: str, tokens: Sequence[int], dropped: int, columns: int, height: int
) -> list[Html]:
    """Its name, its cells (one path for each colour; of many, neighbours that share it are one),
    and its worst."""
    mean = sum(tokens) / max(len(tokens), 1)
    levels = [choose_heat_level(count, mean) for count in tokens]
    over = compute_max_over_mean_load(tokens)
    label = f"{name}: the busiest of {len(tokens)} experts has {over:.2f} times the mean"
    svg = draw_heat_cells(levels, label, num_cells=columns, height_px=height)
    end_text = f"{over:.2f}"
    if dropped:
        end_text += f", {formats.format_rounded_count(dropped)} dropped"
    return [
        build_tag("span", name, class_="heatname"),
        svg,
        build_tag("span", end_text, class_="heatend"),
    ]


def _build_load_table(layers: Sequence[tuple[str, Sequence[int]]], experts: ExpertFacts) -> Html:
    rows = []
    for name, tokens in layers:
        if not tokens:
            continue
        rows.append(
            [
                name,
                f"{sum(tokens):,}",
                f"{max(tokens):,} (expert {tokens.index(max(tokens))})",
                f"{min(tokens):,} (expert {tokens.index(min(tokens))})",
                f"{compute_max_over_mean_load(tokens):.2f}",
                str(tokens.count(0)),
                f"{experts.dropped.get(name, 0):,}",
            ]
        )
    head = ["layer", "choices", "most", "fewest", "max / mean", "got nothing", "dropped"]
    return build_table(head, rows, css_class="num")


def _draw_busiest_expert_chart(facts: RunFacts, *, alone: bool) -> Html:
    experts = facts.experts
    references = []
    if alone:
        references.append(ReferenceLine("even", 1.0, "even"))
    chart = LineChart(
        title="Busiest expert against the mean of its layer",
        y_label="times the mean, of the worst layer",
        unit="times",
        series=[ChartSeries("max / mean", experts.steps, experts.worst)],
        references=references,
        may_be_log=True,
        marks=list_restart_marks(facts),
        x_range=find_step_range(facts),
        note=(
            "Counted at the first step, at each that is logged (observe.log_every) and at the last."
        ),
    )
    return draw_line_chart(chart)


def _draw_dropped_chart(facts: RunFacts) -> Html:
    experts = facts.experts
    chart = LineChart(
        title="Choices that were dropped",
        y_label="% of all choices of the step",
        unit="%",
        series=[
            ChartSeries("dropped", experts.steps, [100 * share for share in experts.dropped_share])
        ],
        marks=list_restart_marks(facts),
        zero=True,
        x_range=find_step_range(facts),
    )
    return draw_line_chart(chart)
