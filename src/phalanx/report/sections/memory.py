"""Memory: what the plan predicted beside what each rank measured, always with the error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from phalanx.core.printable import printable
from phalanx.core.units import describe_predicted_bytes_error
from phalanx.observe.events import MemoryMeasured
from phalanx.report import formats
from phalanx.report.bars import draw_stacked_bar
from phalanx.report.facts import RunFacts
from phalanx.report.figure import draw_legend
from phalanx.report.markup import Html, build_table, build_tag

MAX_SHOWN_RANKS = 32
PEAK_COLUMN = "peak"
UNATTRIBUTED_COLUMN = "not attributed"

_CATEGORY_ORDER = ("parameters", "gradients", "optimizer", "activations", "loss", "communication")
_CSS_CLASSES = ("g1", "g0", "g4", "g2", "g5", "g3", "g7", "g6", "g8", "g9")


def list_memory_categories(*dicts: Mapping[str, object]) -> list[str]:
    """The plan's categories in their usual order, then any others; never the total."""
    names: dict[str, None] = {}
    for mapping in dicts:
        names |= dict.fromkeys(mapping)
    usual = [name for name in _CATEGORY_ORDER if name in names]
    return usual + [name for name in names if name not in (*_CATEGORY_ORDER, PEAK_COLUMN)]


def choose_css_classes_by_category(names: Iterable[str]) -> dict[str, str]:
    """A colour for each category, the same one wherever it appears on the page."""
    # Not strict: there are more colours than usual categories, for others that may come.
    colours = dict(zip(_CATEGORY_ORDER, _CSS_CLASSES, strict=False))
    for name in names:
        if name not in colours:
            # Where there are more names than colours, the rest share the last one.
            colours[name] = _CSS_CLASSES[min(len(colours), len(_CSS_CLASSES) - 1)]
    return colours


def render_memory(facts: RunFacts) -> Html:
    if not facts.memory:
        so_far = "" if facts.is_finished else " yet"
        words = f"Not measured: no rank has reported its memory{so_far}."
        body = build_tag("p", words, class_="note")
        return build_tag(
            "section", build_tag("h2", "Memory, predicted and measured"), body, id="memory"
        )
    ranks = sorted(facts.memory)[:MAX_SHOWN_RANKS]
    events = [facts.memory[rank] for rank in ranks]
    estimates = [event.predicted_bytes for event in events]
    estimates += [event.measured_bytes for event in events]
    names = list_memory_categories(*estimates)
    colour = choose_css_classes_by_category(names)
    full_bytes = max(map(_compute_longest_bar_bytes, events))
    rows = [_render_rank_memory(rank, facts.memory[rank], full_bytes, colour) for rank in ranks]
    left_out = len(facts.memory) - len(ranks)
    note = (
        "Bytes on top of the runtime (interpreter and torch). Errors of the plan are in % of what"
        " was measured."
    )
    if any(_exceeds_plan_beside_training(event) for event in events):
        note += (
            " The plan has steps of training alone: evaluations and the sample are in the measured"
            " peak, and not in it."
        )
    if left_out:
        note += f" The first {MAX_SHOWN_RANKS} ranks are shown; {left_out} are left out."
    return build_tag(
        "section",
        build_tag("h2", "Memory, predicted and measured"),
        draw_legend(names, colour),
        build_table(
            ["rank", "by category", "predicted", "measured", "error", "worst moment", "runtime"],
            rows,
        ),
        build_tag("p", note, class_="note"),
        build_tag(
            "div",
            build_tag("h3", "By category"),
            _render_memory_table(ranks, facts, names),
            class_="block",
        ),
        id="memory",
    )


def _exceeds_plan_beside_training(event: MemoryMeasured) -> bool:
    predicted, measured = event.predicted_bytes, event.measured_bytes
    return not event.is_of_training and (
        compute_total_peak_bytes(measured) > compute_total_peak_bytes(predicted)
    )


def compute_total_peak_bytes(parts: Mapping[str, float]) -> float:
    """The peak if it was given, else the sum of the categories."""
    if PEAK_COLUMN in parts:
        return float(parts[PEAK_COLUMN])
    return float(sum(value for value in parts.values() if math.isfinite(value)))


def _compute_longest_bar_bytes(event: MemoryMeasured) -> float:
    # One byte at least: bars are parts of it.
    return max(
        compute_total_peak_bytes(event.predicted_bytes),
        compute_total_peak_bytes(event.measured_bytes),
        1.0,
    )


def draw_memory_bar(
    parts: Mapping[str, float], full_bytes: float, colour: Mapping[str, str]
) -> Html:
    shown = {name: float(parts[name]) for name in list_memory_categories(parts)}
    unattributed = compute_total_peak_bytes(parts) - sum(shown.values())
    # A peak can be measured where its parts cannot.
    if unattributed > 0:
        shown[UNATTRIBUTED_COLUMN] = unattributed
    return draw_stacked_bar(
        shown,
        {**colour, UNATTRIBUTED_COLUMN: "hatch"},
        full_bytes,
        {name: formats.format_num_bytes(value) for name, value in shown.items()},
    )


def _render_rank_memory(
    rank: int, event: MemoryMeasured, full_bytes: float, colour: Mapping[str, str]
) -> list[Html | str]:
    predicted, measured = (
        compute_total_peak_bytes(event.predicted_bytes),
        compute_total_peak_bytes(event.measured_bytes),
    )
    bars = build_tag(
        "div",
        build_tag("span", "predicted"),
        draw_memory_bar(event.predicted_bytes, full_bytes, colour),
        build_tag("span", "measured"),
        draw_memory_bar(event.measured_bytes, full_bytes, colour),
        class_="barlabel",
    )
    return [
        str(rank), bars, formats.format_num_bytes(predicted), formats.format_num_bytes(measured),
        _format_prediction_error(event, PEAK_COLUMN, predicted, measured),
        printable(event.moment_in_words, 60) or "–",
        formats.format_num_bytes(event.runtime_bytes),
    ]  # fmt: skip


def _render_memory_table(ranks: list[int], facts: RunFacts, names: list[str]) -> Html:
    """A row per rank, a column per category: what was measured, and below it the prediction and
    its error."""
    with_total = [*names, PEAK_COLUMN]
    rows = []
    for rank in ranks:
        rows.append(
            [
                str(rank),
                *[_render_measured_and_predicted(facts.memory[rank], name) for name in with_total],
            ]
        )
    return build_table(
        ["rank", *with_total],
        rows,
        css_class="num",
        caption="Measured; below it predicted, and the error.",
    )


def _render_measured_and_predicted(event: MemoryMeasured, name: str) -> list[Html | str]:
    predicted = formats.number_or_nan(event.predicted_bytes.get(name))
    measured = formats.number_or_nan(event.measured_bytes.get(name))
    if not (math.isfinite(predicted) or math.isfinite(measured)):
        return ["–"]
    error = _format_prediction_error(event, name, predicted, measured)
    return [
        formats.format_num_bytes(measured),
        build_tag("small", formats.format_num_bytes(predicted), " ", build_tag("b", error)),
    ]


def _format_prediction_error(
    event: MemoryMeasured, name: str, predicted: float, measured: float
) -> str:
    """The plan's error as text. Without predicted activations neither they nor the sum has one."""
    if name in (PEAK_COLUMN, "activations") and not event.predicts_activations:
        return "activations not predicted"
    return describe_predicted_bytes_error(predicted, measured)
