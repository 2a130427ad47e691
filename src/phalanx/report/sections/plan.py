"""The plan as it was made: the layout, the reasons, and every alternative with why it lost."""

from __future__ import annotations

import math
from typing import Any

from phalanx.core.units import plural
from phalanx.observe.units import TEXT, Units
from phalanx.report import words
from phalanx.report.charts import legend
from phalanx.report.facts import RunFacts
from phalanx.report.markup import Html, table, tag
from phalanx.report.sections import memory
from phalanx.report.words import as_dict, as_list, as_number, as_text

MAX_ALTERNATIVES = 40
MAX_REASONS = 40


def plan_section(facts: RunFacts) -> Html:
    plan = facts.plan
    if not plan:
        body: list[Html | None] = [
            tag("p", "Not recorded: plan.json is missing or cannot be read.", class_="note")
        ]
    else:
        reasons = [
            tag("li", as_text(reason)) for reason in as_list(plan.get("reasons"))[:MAX_REASONS]
        ]
        body = [
            tag("p", _summary(plan, facts.units)),
            tag("ul", reasons) if reasons else None,
            _alternatives(plan),
        ]
    return tag("section", tag("h2", "The plan"), body, id="plan")


def _summary(plan: dict[str, Any], units: Units) -> str:
    """The plan in sentences; what it does not hold is left out."""
    said = [f"{_ranks(plan)} as {words.layout(as_dict(plan.get('layout')))}{_how(plan)}."]
    batch = [
        as_number(plan.get(key))
        for key in ("global_batch_size", "num_microbatches", "micro_batch_size")
    ]
    seq_len = as_number(plan.get("seq_len"))
    if all(math.isfinite(value) for value in batch):
        length = f" of {seq_len:,.0f} tokens" if math.isfinite(seq_len) and units == TEXT else ""
        noun = "sequences" if units == TEXT else "samples"
        each, micro = plural(int(batch[1]), "micro-batch", "micro-batches"), f"{batch[2]:,.0f}"
        whole = f"{batch[0]:,.0f} {noun}{length}"
        said.append(
            f"Each step takes {whole}: {each} of {micro} {noun} on each data-parallel share."
        )
    parameters, flops = as_number(plan.get("num_params")), as_number(plan.get("flops_per_token"))
    if math.isfinite(parameters):
        work = (
            f" and {words.count(flops)} floating-point operations per token"
            if math.isfinite(flops)
            else ""
        )
        said.append(f"The model has {words.count(parameters)} parameters{work}.")
    said.append(_memory_sentence(as_dict(plan.get("memory"))))
    return " ".join(said)


def _ranks(plan: dict[str, Any]) -> str:
    ranks = as_number(plan.get("world_size"))
    return plural(int(ranks), "rank") if math.isfinite(ranks) else "Ranks not recorded,"


def _how(plan: dict[str, Any]) -> str:
    keys = (
        ("device", "on {}"),
        ("precision", "in {}"),
        ("zero_stage", "ZeRO stage {}"),
        ("recompute", "recompute {}"),
    )
    said = [text.format(as_text(plan[key])) for key, text in keys if plan.get(key) is not None]
    return ", " + ", ".join(said) if said else ""


def _memory_sentence(estimate: dict[str, Any]) -> str:
    total, capacity = (
        as_number(estimate.get("total_bytes")),
        as_number(estimate.get("capacity_bytes")),
    )
    if not math.isfinite(total):
        return "Its memory was not predicted."
    if not math.isfinite(capacity):
        return f"Predicted memory per rank is {words.num_bytes(total)}."
    verdict = "it fits" if estimate.get("fits") is True else "it does not fit"
    share = words.percent(total, capacity)
    return (
        f"Predicted memory per rank is {words.num_bytes(total)}, {share} of the"
        f" {words.num_bytes(capacity)} it may use: {verdict}."
    )


def _alternatives(plan: dict[str, Any]) -> Html:
    found = [
        as_dict(item)
        for item in as_list(plan.get("alternatives"))[:MAX_ALTERNATIVES]
        if isinstance(item, dict)
    ]
    if not found:
        return tag("p", "No alternatives were recorded.", class_="note")
    parts = [
        {str(k): as_number(v) for k, v in as_dict(item.get("predicted_bytes")).items()}
        for item in found
    ]
    names = memory.categories(*parts)
    colour = memory.classes(names)
    totals = [_total(item, part) for item, part in zip(found, parts, strict=True)]
    whole = max([value for value in totals if math.isfinite(value)], default=0.0)
    rows = []
    for item, part, total in zip(found, parts, totals, strict=True):
        chosen = item.get("chosen") is True
        name = tag(
            "span", as_text(item.get("name"), "unnamed"), class_="chosen" if chosen else None
        )
        fits = "yes" if item.get("fits") is True else "no" if item.get("fits") is False else "–"
        why = as_text(item.get("why"), "")
        if chosen and not why.startswith("chosen"):
            why = f"chosen: {why}" if why else "chosen"
        layout = words.layout(as_dict(item.get("layout")))
        rows.append(
            [
                name,
                layout,
                memory.bar(part, whole, colour),
                words.num_bytes(total),
                fits,
                tag("div", why or "–", class_="words"),
            ]
        )
    return tag(
        "div",
        tag("h3", "Alternatives, memory per rank"),
        legend(names, colour),
        table(["", "layout", "predicted, by category", "in all", "fits", "why"], rows),
        class_="block",
    )


def _total(item: dict[str, Any], parts: dict[str, float]) -> float:
    given = as_number(item.get("total_bytes"))
    return given if math.isfinite(given) or not parts else memory.total(parts)
