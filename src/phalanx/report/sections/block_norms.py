"""Which block of the model has gradients or updates unlike its own before, and in which steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from phalanx.observe.events import BlockNormsMeasured
from phalanx.report.block_norm_facts import BlockNormFacts
from phalanx.report.facts import RunFacts
from phalanx.report.figure import draw_legend
from phalanx.report.heat import draw_heat_axis, draw_heat_cells
from phalanx.report.markup import Html, build_table, build_tag
from phalanx.report.sample import split_into_buckets

MAX_BLOCKS, MAX_COLUMNS = 160, 120
_TALL_PX, _LOW_PX = 20, 11
_MAX_TALL_ROWS = 24
_NUM_TICKS = 8
_NOT_FINITE = "not finite"

# (most, colour class, words), from the left on. Of a gradient: over the block's own median.
GRADIENT_LEVELS = (
    (0.125, 1, "1/8 of its median or less"),
    (0.5, 2, "to 1/2"),
    (0.8, 3, "to 0.8"),
    (1.25, 4, "about its median"),
    (2.0, 5, "to 2 times"),
    (8.0, 6, "to 8 times"),
    (math.inf, 7, "more"),
)
# Of an update: over the block's weights.
UPDATE_LEVELS = (
    (1e-6, 1, "1e-6 or less"),
    (1e-5, 2, "to 1e-5"),
    (1e-4, 3, "to 1e-4"),
    (1e-3, 4, "to 1e-3"),
    (1e-2, 5, "to 0.01"),
    (1e-1, 6, "to 0.1"),
    (math.inf, 7, "more"),
)
_NOT_FINITE_LEVEL = 0


@dataclass(frozen=True)
class _NormMap:
    """One map: by block a value in each column (NaN: not finite, None: nothing measured)."""

    title: str
    note: str
    right: str
    levels: tuple[tuple[float, int, str], ...]
    rows: Mapping[str, Sequence[float | None]]
    end_texts: Mapping[str, str]


def has_block_norms(facts: RunFacts) -> bool:
    return bool(facts.block_norms.steps)


def render_block_norms(facts: RunFacts) -> Html | None:
    """The section; None where nothing was measured."""
    norms = facts.block_norms
    if not norms.steps:
        return None
    columns = split_into_buckets(len(norms.steps), MAX_COLUMNS)
    names = norms.names[:MAX_BLOCKS]
    maps = [_map_gradients(norms, names, columns)]
    if any(event.update_norms for event in norms.steps):
        maps.append(_map_updates(norms, names, columns))
    return build_tag(
        "section",
        build_tag("h2", "Blocks of the model"),
        build_tag("p", _describe_last_step(norms)),
        [_draw_map(norm_map, norms, columns) for norm_map in maps],
        id="blocks",
    )


def _describe_last_step(norms: BlockNormFacts) -> str:
    last = norms.steps[-1]
    for event in norms.steps:
        if event.nonfinite:
            return (
                f"At step {int(event.step):,} the gradients of {event.nonfinite[0]} are not finite"
                f" ({len(event.nonfinite)} of {len(norms.names)} blocks)."
            )
    if not last.gradient_norms:
        return f"Nothing was measured at step {int(last.step):,}."
    name = max(last.gradient_norms, key=last.gradient_norms.__getitem__)
    square = sum(norm * norm for norm in last.gradient_norms.values())
    share = last.gradient_norms[name] ** 2 / square if square > 0 else 0.0
    return (
        f"At step {int(last.step):,} {name} has the largest gradient:"
        f" {100 * share:.0f}\u00a0% of the square of the norm of all."
    )


def _map_gradients(
    norms: BlockNormFacts, names: Sequence[str], columns: Sequence[tuple[int, int]]
) -> _NormMap:
    rows: dict[str, list[float | None]] = {}
    end_texts: dict[str, str] = {}
    for name in names:
        values = [_get_gradient_norm(event, name) for event in norms.steps]
        finite = [value for value in values if value is not None and math.isfinite(value)]
        usual = median(finite) if finite else 0.0
        rows[name] = []
        for start, end in columns:
            most = _find_most(values[start:end])
            if most is not None and usual > 0:
                most /= usual
            rows[name].append(most)
        end_texts[name] = _format_norm(values[-1])
    return _NormMap(
        "Gradient norm of each block",
        "Across: the steps that were measured (observe.norms_every). Colour: the norm of the"
        " block's gradients over all ranks, before clipping, over its own median in the run"
        f" ({_count_measured_steps(norms)}).",
        "last",
        GRADIENT_LEVELS,
        rows,
        end_texts,
    )


def _count_measured_steps(norms: BlockNormFacts) -> str:
    count = len(norms.steps)
    if count == 1:
        return "one step was measured: nothing to compare it with"
    return f"{count:,} measured steps"


def _map_updates(
    norms: BlockNormFacts, names: Sequence[str], columns: Sequence[tuple[int, int]]
) -> _NormMap:
    ratios = [event.update_ratios for event in norms.steps]
    rows: dict[str, list[float | None]] = {}
    end_texts: dict[str, str] = {}
    for name in names:
        values = [of_step.get(name) for of_step in ratios]
        rows[name] = [_find_most(values[start:end]) for start, end in columns]
        known = [value for value in values if value is not None]
        end_texts[name] = _format_norm(known[-1] if known else None)
    return _NormMap(
        "Update of each block over its weights",
        "Colour: the norm of what a step changed of the block's weights over the norm of these"
        " weights. Empty: the step was not applied, or its update was not measured.",
        "last",
        UPDATE_LEVELS,
        rows,
        end_texts,
    )


def _get_gradient_norm(event: BlockNormsMeasured, name: str) -> float | None:
    if name in event.nonfinite:
        return math.nan
    return event.gradient_norms.get(name)


def _find_most(values: Sequence[float | None]) -> float | None:
    """The largest of a column's values, NaN where one of them is; None of none."""
    known = [value for value in values if value is not None]
    if any(math.isnan(value) for value in known):
        return math.nan
    return max(known, default=None)


def choose_norm_level(value: float | None, levels: Sequence[tuple[float, int, str]]) -> int | None:
    """The colour class (h0 to h7) of a value; None where nothing was measured."""
    if value is None:
        return None
    if math.isnan(value):
        return _NOT_FINITE_LEVEL
    return next(level for most, level, _ in levels if value <= most)


def _draw_map(
    norm_map: _NormMap, norms: BlockNormFacts, columns: Sequence[tuple[int, int]]
) -> Html:
    height = _TALL_PX if len(norm_map.rows) <= _MAX_TALL_ROWS else _LOW_PX
    rows = []
    for name, values in norm_map.rows.items():
        levels = [choose_norm_level(value, norm_map.levels) for value in values]
        end_text = norm_map.end_texts[name]
        label = f"{name}: {end_text} in the last measured step"
        rows += [
            build_tag("span", name, class_="heatname"),
            draw_heat_cells(levels, label, num_cells=len(levels), height_px=height),
            build_tag("span", end_text, class_="heatend"),
        ]
    classes = {words: f"h{level}" for _, level, words in norm_map.levels}
    if any(
        value is not None and math.isnan(value) for row in norm_map.rows.values() for value in row
    ):
        classes[_NOT_FINITE] = f"h{_NOT_FINITE_LEVEL}"
    note = norm_map.note
    if len(columns) < len(norms.steps):
        note += " A column has the largest of several steps."
    if len(norms.names) > len(norm_map.rows):
        note += f" The first {len(norm_map.rows)} of {len(norms.names)} blocks are shown."
    period = max(math.ceil(len(columns) / _NUM_TICKS), 1)
    ticks = []
    for index, (start, _) in enumerate(columns):
        ticks.append(f"{int(norms.steps[start].step):,}" if index % period == 0 else "")
    return build_tag(
        "figure",
        build_tag(
            "figcaption",
            build_tag("h3", norm_map.title),
            draw_legend(list(classes), classes),
        ),
        build_tag("div", rows, draw_heat_axis(ticks, norm_map.right), class_="heat"),
        build_tag("p", note, class_="note"),
        build_tag(
            "details",
            build_tag("summary", "Data table"),
            _build_last_step_table(norms, list(norm_map.rows)),
        ),
        class_="chart",
    )


def _build_last_step_table(norms: BlockNormFacts, names: Sequence[str]) -> Html:
    """A line for each block, of the newest step that has an update (else the newest)."""
    with_update = [event for event in norms.steps if event.update_norms]
    event = with_update[-1] if with_update else norms.steps[-1]
    ratios = event.update_ratios
    rows = [
        [
            name,
            _format_norm(_get_gradient_norm(event, name)),
            _format_norm(event.update_norms.get(name)),
            _format_norm(event.weight_norms.get(name)),
            _format_norm(ratios.get(name)),
        ]
        for name in names
    ]
    head = [f"step {int(event.step):,}", "gradient", "update", "weights", "update / weights"]
    return build_table(head, rows, css_class="num")


def _format_norm(value: float | None) -> str:
    if value is None:
        return "–"
    if not math.isfinite(value):
        return _NOT_FINITE
    return f"{value:.3g}"
