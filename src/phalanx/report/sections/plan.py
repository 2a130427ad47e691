"""The plan as it was made: the layout, the reasons, and every alternative with why it lost."""

from __future__ import annotations

import math
from typing import Any

from phalanx.core.units import plural
from phalanx.observe.units import TEXT, Units
from phalanx.report import formats
from phalanx.report.facts import RunFacts
from phalanx.report.figure import draw_legend
from phalanx.report.formats import dict_or_empty, list_or_empty, number_or_nan, text_or_missing
from phalanx.report.markup import Html, table, tag
from phalanx.report.sections import memory

MAX_ALTERNATIVES = 40
MAX_REASONS = 40


def render_plan(facts: RunFacts) -> Html:
    plan = facts.plan
    if not plan:
        body: list[Html | None] = [
            tag("p", "Not recorded: plan.json is missing or cannot be read.", class_="note")
        ]
    else:
        reasons = [
            tag("li", text_or_missing(reason))
            for reason in list_or_empty(plan.get("reasons"))[:MAX_REASONS]
        ]
        body = [
            tag("p", _describe_plan(plan, facts.units)),
            tag("ul", reasons) if reasons else None,
            _alternatives(plan),
        ]
    return tag("section", tag("h2", "The plan"), body, id="plan")


def _describe_plan(plan: dict[str, Any], units: Units) -> str:
    """The plan in sentences; what it does not hold is left out."""
    layout = formats.layout(dict_or_empty(plan.get("layout")))
    sentences = [f"{_describe_ranks(plan)} as {layout}{_describe_settings(plan)}."]
    batch = [
        number_or_nan(plan.get(key))
        for key in ("global_batch_size", "num_microbatches", "micro_batch_size")
    ]
    seq_len = number_or_nan(plan.get("seq_len"))
    if all(math.isfinite(value) for value in batch):
        length = f" of {seq_len:,.0f} tokens" if math.isfinite(seq_len) and units == TEXT else ""
        noun = "sequences" if units == TEXT else "samples"
        each, micro = plural(int(batch[1]), "micro-batch", "micro-batches"), f"{batch[2]:,.0f}"
        batch_text = f"{batch[0]:,.0f} {noun}{length}"
        sentences.append(
            f"Each step takes {batch_text}: {each} of {micro} {noun} on each data-parallel share."
        )
    parameters, flops = (
        number_or_nan(plan.get("num_params")),
        number_or_nan(plan.get("flops_per_token")),
    )
    if math.isfinite(parameters):
        work = (
            f" and {formats.rounded_count(flops)} floating-point operations per token"
            if math.isfinite(flops)
            else ""
        )
        sentences.append(f"The model has {formats.rounded_count(parameters)} parameters{work}.")
    sentences.append(_describe_memory(dict_or_empty(plan.get("memory"))))
    return " ".join(sentences)


def _describe_ranks(plan: dict[str, Any]) -> str:
    ranks = number_or_nan(plan.get("world_size"))
    return plural(int(ranks), "rank") if math.isfinite(ranks) else "Ranks not recorded,"


def _describe_settings(plan: dict[str, Any]) -> str:
    keys = (
        ("device", "on {}"),
        ("precision", "in {}"),
        ("zero_stage", "ZeRO stage {}"),
        ("recompute", "recompute {}"),
    )
    settings = [
        text.format(text_or_missing(plan[key])) for key, text in keys if plan.get(key) is not None
    ]
    return ", " + ", ".join(settings) if settings else ""


def _describe_memory(estimate: dict[str, Any]) -> str:
    total, capacity = (
        number_or_nan(estimate.get("total_bytes")),
        number_or_nan(estimate.get("capacity_bytes")),
    )
    if not math.isfinite(total):
        return "Its memory was not predicted."
    if not math.isfinite(capacity):
        return f"Predicted memory per rank is {formats.num_bytes(total)}."
    verdict = "it fits" if estimate.get("fits") is True else "it does not fit"
    share = formats.percent(total, capacity)
    return (
        f"Predicted memory per rank is {formats.num_bytes(total)}, {share} of the"
        f" {formats.num_bytes(capacity)} it may use: {verdict}."
    )


def _alternatives(plan: dict[str, Any]) -> Html:
    alternatives = [
        dict_or_empty(item)
        for item in list_or_empty(plan.get("alternatives"))[:MAX_ALTERNATIVES]
        if isinstance(item, dict)
    ]
    if not alternatives:
        return tag("p", "No alternatives were recorded.", class_="note")
    parts = [
        {str(k): number_or_nan(v) for k, v in dict_or_empty(item.get("predicted_bytes")).items()}
        for item in alternatives
    ]
    names = memory.categories(*parts)
    colour = memory.classes(names)
    totals = [_total(item, part) for item, part in zip(alternatives, parts, strict=True)]
    full_bytes = max([value for value in totals if math.isfinite(value)], default=0.0)
    rows = []
    for item, part, total in zip(alternatives, parts, totals, strict=True):
        chosen = item.get("chosen") is True
        name = tag(
            "span",
            text_or_missing(item.get("name"), "unnamed"),
            class_="chosen" if chosen else None,
        )
        fits = "yes" if item.get("fits") is True else "no" if item.get("fits") is False else "–"
        why = text_or_missing(item.get("why"), "")
        if chosen and not why.startswith("chosen"):
            why = f"chosen: {why}" if why else "chosen"
        layout = formats.layout(dict_or_empty(item.get("layout")))
        rows.append(
            [
                name,
                layout,
                memory.bar(part, full_bytes, colour),
                formats.num_bytes(total),
                fits,
                tag("div", why or "–", class_="words"),
            ]
        )
    return tag(
        "div",
        tag("h3", "Alternatives, memory per rank"),
        draw_legend(names, colour),
        table(["", "layout", "predicted, by category", "in all", "fits", "why"], rows),
        class_="block",
    )


def _total(item: dict[str, Any], parts: dict[str, float]) -> float:
    total_bytes = number_or_nan(item.get("total_bytes"))
    return total_bytes if math.isfinite(total_bytes) or not parts else memory.total(parts)
