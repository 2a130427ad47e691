"""The top of the page: what the run is, how it ended, and the ten numbers one asks for first."""

from __future__ import annotations

import math

from phalanx.core.units import plural
from phalanx.report import formats
from phalanx.report.facts import SENT_OVER, RunFacts
from phalanx.report.markup import Html, tag

_STATUS_CLASS = {"finished": "finished", "failed": "bad", "interrupted": "bad", "preempted": "open"}
_UNITS = ("nats/token", "tokens/s", "targets/s")  # set smaller than the number before them
MAX_WARNINGS = 10


def render_header(facts: RunFacts) -> Html:
    status_class = _STATUS_CLASS.get(facts.status, "open")
    return tag(
        "header",
        tag(
            "div",
            tag("h1", facts.name),
            tag("span", facts.status, class_=f"status {status_class}"),
            class_="name",
        ),
        tag("p", _describe_when(facts), class_="when"),
        tag("dl", [_key(*key) for key in _keys(facts)], class_="keys"),
        [tag("p", text, class_="note warning") for text in facts.warnings[:MAX_WARNINGS]],
    )


def _key(name: str, value: str, detail: str = "") -> Html:
    unit = next((unit for unit in _UNITS if value.endswith(unit)), "")
    children = [value.removesuffix(unit), tag("span", unit, class_="unit") if unit else None]
    return tag(
        "div", tag("dt", name), tag("dd", children, tag("small", detail) if detail else None)
    )


def _describe_when(facts: RunFacts) -> str:
    if not facts.num_events:
        return "This run has written no events yet."
    started = formats.timestamp(facts.started_unix_s)
    when = f"Started {started}, last event {formats.timestamp(facts.last_unix_s)}."
    if facts.is_finished:
        return when
    return f"{when} No end was recorded: it is still running, or it was cut off."


def _keys(facts: RunFacts) -> list[tuple[str, str, str]]:
    steps = facts.steps
    done = f"{facts.last_step:,}" + (
        f" / {facts.total_steps:,}" if facts.total_steps is not None else ""
    )
    redone = f"{plural(facts.num_redone, 'step')} done again" if facts.num_redone else ""
    held_out, against = _describe_held_out(facts)
    is_measured = math.isfinite(facts.tokens_per_s)
    rate = (
        f"{formats.rounded_count(facts.tokens_per_s)} {facts.units.rate}"
        if is_measured
        else formats.NOT_MEASURED
    )
    tokens = f"{facts.world_size} x {facts.device}" if facts.world_size else facts.device
    loss = steps.loss[-1] if len(steps) else math.nan
    return [
        ("Steps done", done if facts.num_events else "none", redone),
        (
            "Final training loss",
            formats.loss(loss, facts.units.loss),
            f"of step {steps.step[-1]:,}" if len(steps) else "",
        ),
        ("Held-out loss", held_out, against),
        ("Throughput", rate, "median over steps" if len(steps) else ""),
        ("Wall time", formats.seconds(facts.wall_s), ""),
        (
            "Restarts",
            str(facts.num_restarts),
            f"{facts.num_rolled_back:,} steps rolled back" if redone else "",
        ),
        *([("Resumes", str(facts.num_resumes), "")] if facts.num_resumes else []),
        ("Skipped steps", str(len(facts.skipped)), ""),
        ("Layout", formats.layout(dict(facts.layout)), tokens),
        *_list_sent(facts),
        *_pipeline(facts),
        *(
            [("Gradients sent", facts.sent.partition(",")[0], facts.sent.partition(", ")[2])]
            if facts.sent
            else []
        ),
    ]


def _list_sent(facts: RunFacts) -> list[tuple[str, str, str]]:
    tiles = []
    for axis, noun in SENT_OVER.items():
        amount = facts.describe_sent_over(axis)
        if amount:
            tiles.append((f"Sent over {axis}", amount, f"{noun} and their gradients"))
    return tiles


def _pipeline(facts: RunFacts) -> list[tuple[str, str, str]]:
    if not facts.pipelines:
        return []
    last = facts.pipelines[-1]
    expected = f"predicted {formats.percent(last.bubble_predicted, 1.0)}, of step {last.step:,}"
    return [("Waiting for other stages", formats.percent(last.bubble_measured, 1.0), expected)]


def _describe_held_out(facts: RunFacts) -> tuple[str, str]:
    """The last evaluation, the best one if that is another, and how far it stands from each
    n-gram model."""
    if not facts.evals:
        return formats.NOT_MEASURED, ""
    last, best = facts.evals[-1], facts.best
    remarks = []
    if best is not None and best.step != last.step:
        remarks.append(f"best {formats.judged_value(best)} at step {best.step:,}")
    elif len(facts.evals) > 1:
        remarks.append(f"the best of {len(facts.evals)} evaluations")
    remarks += [f"{name} {value:.4f}" for name, value in last.metrics.items()]
    for baseline in facts.baselines:
        gap = last.loss - baseline.loss
        if math.isfinite(gap):
            side = "below" if gap < 0 else "above"
            remarks.append(f"{abs(gap):.3f} nats {side} {baseline.name} ({baseline.loss:.3f})")
    return formats.loss(last.loss, facts.units.loss), "; ".join(remarks)
