"""Which rank holds what: the ranks as the layout places them, and the parts of the model that each
has."""

from __future__ import annotations

from phalanx.core.errors import LayoutError
from phalanx.core.units import plural
from phalanx.plan.layout import AXES, Layout
from phalanx.report.bubble import parse_pipeline_of_plan
from phalanx.report.facts import RunFacts
from phalanx.report.formats import dict_or_empty, finite_or_zero, number_or_nan
from phalanx.report.markup import Html, build_table, build_tag
from phalanx.report.sections.stragglers import choose_excess_level

MAX_MESH_CELLS = 2048
_MAX_COLUMNS = 64
_WORDS_OF_AXIS = {
    "pp": "stages of the model",
    "dp_replicate": "copies, each with other samples",
    "dp_shard": "other samples, and parts of the state",
    "cp": "other tokens of the same sequences",
    "tp": "parts of each layer",
}


def has_mesh(facts: RunFacts) -> bool:
    layout = parse_layout_of_run(facts)
    return layout is not None and layout.world_size > 1


def parse_layout_of_run(facts: RunFacts) -> Layout | None:
    """The layout that the run says it has; None where it is none, or too large to be one."""
    degrees = {axis: degree for axis, degree in facts.layout.items() if axis in (*AXES, "ep")}
    try:
        layout = Layout.from_json(degrees)
    except (LayoutError, TypeError):
        return None
    if layout.world_size > 10**7:
        return None
    return layout


def render_mesh(facts: RunFacts) -> Html | None:
    """The section; None for one rank."""
    layout = parse_layout_of_run(facts)
    if layout is None or layout.world_size < 2:
        return None
    return build_tag(
        "section",
        build_tag("h2", "The mesh"),
        build_tag("p", _describe_axes(layout)),
        _draw_mesh(layout, facts),
        _render_axis_table(layout),
        build_tag(
            "details",
            build_tag("summary", "What each rank holds"),
            _render_holdings(layout, facts),
        ),
        id="mesh",
    )


def _describe_axes(layout: Layout) -> str:
    return (
        f"{plural(layout.world_size, 'rank')} as {layout}: neighbouring ranks differ in the"
        " innermost axis."
    )


def _draw_mesh(layout: Layout, facts: RunFacts) -> Html:
    """A cell for each rank: a block of rows for each stage, a row for each data-parallel place."""
    width = layout.cp * layout.tp
    if width == 1:
        # Of data parallelism alone: one row for each copy of the model.
        width = layout.dp_shard if layout.dp_shard > 1 else layout.data_parallel_size
    width = min(width, _MAX_COLUMNS)
    per_stage = layout.world_size // layout.pp
    num_shown = min(layout.world_size, MAX_MESH_CELLS)
    blocks = []
    for first in range(0, num_shown, per_stage):
        cells = [
            _draw_cell(rank, facts) for rank in range(first, min(first + per_stage, num_shown))
        ]
        title = None
        if layout.pp > 1:
            title = build_tag("h4", f"pp {first // per_stage}", class_="meshname")
        grid = build_tag("div", cells, class_="mesh", style=f"--columns:{width}")
        blocks.append(build_tag("div", title, grid))
    note = "A cell is a rank."
    if facts.self_times is not None:
        note += " Its colour is that of its own time in the mean, as in “Ranks side by side”."
    if num_shown < layout.world_size:
        note += f" The first {num_shown:,} of {layout.world_size:,} are shown."
    label = f"{plural(layout.world_size, 'rank')} as {layout}; the tables have what each holds"
    return build_tag(
        "figure",
        build_tag("figcaption", build_tag("h3", "Ranks where they stand")),
        build_tag("div", blocks, class_="meshes", role="img", aria_label=label),
        build_tag("p", note, class_="note"),
        class_="chart",
    )


def _draw_cell(rank: int, facts: RunFacts) -> Html:
    css_class = None
    times = facts.self_times
    if times is not None and rank in times.mean_excess_s:
        level = choose_excess_level(times.mean_excess_s[rank], times.step_s)
        css_class = f"h{level}"
    return build_tag("i", str(rank), class_=css_class)


def _render_axis_table(layout: Layout) -> Html:
    rows = []
    stride = layout.world_size
    for axis in AXES:
        degree = getattr(layout, axis)
        stride //= degree
        if degree > 1:
            group = [str(index * stride) for index in range(min(degree, 8))]
            text = ", ".join(group)
            if degree > len(group):
                text += ", …"
            rows.append([axis, str(degree), _WORDS_OF_AXIS[axis], text])
    if layout.ep > 1:
        rows.append(["ep", str(layout.ep), "other experts (folds over dp_shard and cp)", ""])
    head = ["axis", "ranks of a group", "its ranks have", "the group of rank 0"]
    return build_table(head, rows)


def _render_holdings(layout: Layout, facts: RunFacts) -> Html:
    """A row for each rank, or of many the ranks of each stage."""
    head = ["rank", "blocks", "of each layer", "tokens", "samples", "state"]
    rows = []
    for rank in range(min(layout.world_size, MAX_MESH_CELLS)):
        at = layout.coordinates(rank)
        rows.append(
            [
                str(rank),
                _describe_blocks(layout, at["pp"], facts),
                _describe_part(at["tp"], layout.tp),
                _describe_part(at["cp"], layout.cp),
                _describe_part(layout.data_parallel_rank(rank), layout.data_parallel_size),
                _describe_state(at["dp_shard"], layout, facts),
            ]
        )
    return build_table(head, rows)


def _describe_part(coordinate: int, degree: int) -> str:
    if degree == 1:
        return "all"
    return f"{coordinate + 1} of {degree}"


def _describe_blocks(layout: Layout, pp_rank: int, facts: RunFacts) -> str:
    if layout.pp == 1:
        return "all"
    pipeline = parse_pipeline_of_plan(facts.plan)
    if pipeline is None or pp_rank >= pipeline.num_ranks:
        return "not recorded"
    ranges = pipeline.stages.block_ranges
    parts = []
    for stage in pipeline.stages_of_rank(pp_rank):
        first, end = ranges[stage]
        text = f"{first}–{end - 1}" if end - first > 1 else f"{first}"
        if end == first:
            text = "none"
        if stage == 0:
            text += " with embedding"
        if stage == pipeline.num_stages - 1:
            text += " with head"
        parts.append(text)
    return "; ".join(parts)


def _describe_state(coordinate: int, layout: Layout, facts: RunFacts) -> str:
    """The tensors that dp_shard divides: by the ZeRO stage of the plan."""
    stage = int(finite_or_zero(number_or_nan(dict_or_empty(facts.plan).get("zero_stage"))))
    if stage == 0 or layout.dp_shard == 1:
        return "whole"
    names = ("optimizer", "optimizer and gradients", "optimizer, gradients and parameters")
    return f"{names[min(stage, 3) - 1]}: {_describe_part(coordinate, layout.dp_shard)}"
