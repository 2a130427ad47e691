"""The plan as it was made: the layout, the reasons, and every alternative with why it lost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from phalanx.core.units import plural
from phalanx.observe.units import TEXT_METRIC_UNITS, MetricUnits
from phalanx.report import formats
from phalanx.report.facts import RunFacts
from phalanx.report.figure import draw_legend
from phalanx.report.formats import dict_or_empty, list_or_empty, number_or_nan, text_or_missing
from phalanx.report.markup import Html, build_table, build_tag
from phalanx.report.sections import memory

MAX_ALTERNATIVES = 40
MAX_REASONS = 40


def render_plan(facts: RunFacts) -> Html:
    plan = facts.plan
    if not plan:
        body: list[Html | None] = [
            build_tag("p", "Not recorded: plan.json is missing or cannot be read.", class_="note")
        ]
    else:
        reasons = [
            build_tag("li", text_or_missing(reason))
            for reason in list_or_empty(plan.get("reasons"))[:MAX_REASONS]
        ]
        body = [
            build_tag("p", _describe_plan(plan, facts.units)),
            build_tag("ul", reasons) if reasons else None,
            _render_alternatives(plan),
        ]
    return build_tag("section", build_tag("h2", "The plan"), body, id="plan")


def _describe_plan(plan: dict[str, Any], units: MetricUnits) -> str:
    """The plan in sentences; what it does not hold is left out."""
    layout = formats.format_layout(dict_or_empty(plan.get("layout")))
    sentences = [f"{_describe_ranks(plan)} as {layout}{_describe_plan_settings(plan)}."]
    sentences += _describe_batch(plan, units)
    sentences += _describe_model(plan)
    sentences.append(_describe_memory(dict_or_empty(plan.get("memory"))))
    return " ".join(sentences)


def _describe_batch(plan: dict[str, Any], units: MetricUnits) -> list[str]:
    """A sentence about a step's samples; none if the plan does not say all of it."""
    batch_size = number_or_nan(plan.get("global_batch_size"))
    num_microbatches = number_or_nan(plan.get("num_microbatches"))
    micro_batch_size = number_or_nan(plan.get("micro_batch_size"))
    # The sum is NaN if one of them is.
    if not math.isfinite(batch_size + num_microbatches + micro_batch_size):
        return []
    seq_len = number_or_nan(plan.get("seq_len"))
    noun = "samples"
    if units == TEXT_METRIC_UNITS:
        noun = "sequences"
    amount = f"{batch_size:,.0f} {noun}"
    if math.isfinite(seq_len) and units == TEXT_METRIC_UNITS:
        amount += f" of {seq_len:,.0f} tokens"
    micro_batches = plural(int(num_microbatches), "micro-batch", "micro-batches")
    return [
        f"Each step takes {amount}: {micro_batches} of {micro_batch_size:,.0f} {noun} on each"
        " data-parallel share."
    ]


def _describe_model(plan: dict[str, Any]) -> list[str]:
    """A sentence about the model's size; none if the plan does not say it."""
    num_params = number_or_nan(plan.get("num_params"))
    flops = number_or_nan(plan.get("flops_per_token"))
    if not math.isfinite(num_params):
        return []
    size = f"{formats.format_rounded_count(num_params)} parameters"
    if math.isfinite(flops):
        size += f" and {formats.format_rounded_count(flops)} floating-point operations per token"
    return [f"The model has {size}."]


def _describe_ranks(plan: dict[str, Any]) -> str:
    ranks = number_or_nan(plan.get("world_size"))
    if not math.isfinite(ranks):
        return "Ranks not recorded,"
    return plural(int(ranks), "rank")


def _describe_plan_settings(plan: dict[str, Any]) -> str:
    keys = (
        ("device", "on {}"),
        ("precision", "in {}"),
        ("zero_stage", "ZeRO stage {}"),
        ("recompute", "recompute {}"),
    )
    settings = ""
    for key, text in keys:
        if plan.get(key) is not None:
            settings += f", {text.format(text_or_missing(plan[key]))}"
    return settings


def _describe_memory(estimate: dict[str, Any]) -> str:
    total = number_or_nan(estimate.get("total_bytes"))
    capacity = number_or_nan(estimate.get("capacity_bytes"))
    if not math.isfinite(total):
        return "Its memory was not predicted."
    if not math.isfinite(capacity):
        return f"Predicted memory per rank is {formats.format_num_bytes(total)}."
    verdict = "it does not fit"
    if estimate.get("fits") is True:
        verdict = "it fits"
    share = formats.format_percent(total, capacity)
    return (
        f"Predicted memory per rank is {formats.format_num_bytes(total)}, {share} of the"
        f" {formats.format_num_bytes(capacity)} it may use: {verdict}."
    )


def _render_alternatives(plan: dict[str, Any]) -> Html:
    alternatives = _parse_alternatives(plan)
    if not alternatives:
        return build_tag("p", "No alternatives were recorded.", class_="note")
    names = memory.list_memory_categories(
        *[alternative.predicted_bytes for alternative in alternatives]
    )
    colour = memory.choose_css_classes_by_category(names)
    totals = [alternative.total_bytes for alternative in alternatives]
    full_bytes = max(filter(math.isfinite, totals), default=0.0)
    rows = [_render_alternative(alternative, full_bytes, colour) for alternative in alternatives]
    return build_tag(
        "div",
        build_tag("h3", "Alternatives, memory per rank"),
        draw_legend(names, colour),
        build_table(["", "layout", "predicted, by category", "in all", "fits", "why"], rows),
        class_="block",
    )


@dataclass(frozen=True)
class _Alternative:
    """A layout that the plan weighed; `total_bytes` is NaN if nothing says it."""

    name: str
    layout: str
    predicted_bytes: dict[str, float]
    total_bytes: float
    fits: str
    why: str
    is_chosen: bool


def _parse_alternatives(plan: dict[str, Any]) -> list[_Alternative]:
    """The plan's alternatives; what is no object is left out."""
    alternatives = []
    for item in list_or_empty(plan.get("alternatives"))[:MAX_ALTERNATIVES]:
        if isinstance(item, dict):
            alternatives.append(_parse_alternative(item))
    return alternatives


def _parse_alternative(item: dict[str, Any]) -> _Alternative:
    predicted_bytes = {}
    for name, num_bytes in dict_or_empty(item.get("predicted_bytes")).items():
        predicted_bytes[str(name)] = number_or_nan(num_bytes)
    total_bytes = number_or_nan(item.get("total_bytes"))
    if predicted_bytes and not math.isfinite(total_bytes):
        total_bytes = memory.compute_total_peak_bytes(predicted_bytes)
    fits = "–"
    if isinstance(item.get("fits"), bool):
        fits = "no"
        if item["fits"]:
            fits = "yes"
    return _Alternative(
        name=text_or_missing(item.get("name"), "unnamed"),
        layout=formats.format_layout(dict_or_empty(item.get("layout"))),
        predicted_bytes=predicted_bytes,
        total_bytes=total_bytes,
        fits=fits,
        why=text_or_missing(item.get("why"), ""),
        is_chosen=item.get("chosen") is True,
    )


def _render_alternative(
    alternative: _Alternative, full_bytes: float, colour: dict[str, str]
) -> list[Html | str]:
    why, css_class = alternative.why, None
    if alternative.is_chosen:
        css_class = "chosen"
        if not why:
            why = "chosen"
        elif not why.startswith("chosen"):
            why = f"chosen: {why}"
    return [
        build_tag("span", alternative.name, class_=css_class),
        alternative.layout,
        memory.draw_memory_bar(alternative.predicted_bytes, full_bytes, colour),
        formats.format_num_bytes(alternative.total_bytes),
        alternative.fits,
        build_tag("div", why or "–", class_="words"),
    ]
