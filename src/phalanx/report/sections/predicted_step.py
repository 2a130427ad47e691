"""A step as the plan predicted it beside a step as it was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from phalanx.core.units import plural
from phalanx.report import formats
from phalanx.report.bottleneck.step_table import name_attempt_of_steps
from phalanx.report.facts import RankPhaseSeconds, RunFacts
from phalanx.report.markup import Html, build_table, build_tag


@dataclass(frozen=True)
class _Part:
    """A part of a step: the terms of `StepTime` that it is predicted as, and the groups of phases
    that it is measured in."""

    name: str
    terms: tuple[str, ...]
    groups: tuple[str, ...]
    is_of_least_rank: bool = False
    """Of the rank that has least of it, and not the mean: the others wait there, too."""


_COMPUTATION = _Part(
    "forward and backward",
    ("ideal", "matmul loss", "attention", "elementwise", "launch"),
    ("forward", "backward"),
)
_COMMUNICATION = _Part(
    "communication", ("tp", "cp", "ep", "dp exposed"), ("collective",), is_of_least_rank=True
)
_BUBBLE = _Part("waiting for other stages", ("bubble",), ("pipeline",))
_OPTIMIZER = _Part("optimizer", ("optimizer",), ("optimizer",))
_PARTS = (_COMPUTATION, _COMMUNICATION, _BUBBLE, _OPTIMIZER)


def render_predicted_step(facts: RunFacts) -> Html | None:
    """The predicted step beside the measured one; None where the plan says no time, or no step was
    recorded."""
    predicted = formats.dict_or_empty(facts.plan.get("step_time"))
    terms = {
        str(name): formats.number_or_nan(value)
        for name, value in formats.dict_or_empty(predicted.get("terms")).items()
    }
    total_s = sum(terms.values())
    # The first steps allocate and compile, and earlier attempts may have had another layout.
    ranks = facts.newest_ranks or facts.ranks
    planned = formats.dict_or_empty(facts.plan.get("layout"))
    if not formats.is_same_layout(_find_layout_of_steps(facts), planned):
        return None
    if not ranks or not (math.isfinite(total_s) and total_s > 0):
        return None
    low_s, high_s = (formats.number_or_nan(predicted.get(key)) for key in ("low_s", "high_s"))
    median_s = ranks[0].p50_s
    rows = [_build_row("a whole step", total_s, median_s)]
    for part in _PARTS:
        part_s = sum(terms.get(term, 0.0) for term in part.terms)
        measured_s = _measure(part, ranks)
        if part_s > 0 or measured_s > 0:
            rows.append(_build_row(part.name, part_s, measured_s))
    inside = "inside" if low_s <= median_s <= high_s else "outside"
    interval = f"{formats.format_milliseconds(low_s)} to {formats.format_milliseconds(high_s)}"
    return build_tag(
        "div",
        build_tag("h3", "A step, predicted and measured"),
        build_table(["part", "predicted", "measured", "error of the plan"], rows, css_class="num"),
        build_tag(
            "p",
            f"The whole step is rank {ranks[0].rank}'s median over"
            f" {plural(ranks[0].num_steps, 'step')}, {_name_steps(facts)}: {inside} the plan's 80 %"
            f" interval ({interval}). Parts are means over ranks and these steps, communication"
            " that of the rank which has least of it: the others wait for each other there, too."
            " What the plan adds for jitter and offloading is in the whole step alone.",
            class_="note",
        ),
        class_="block",
    )


def _name_steps(facts: RunFacts) -> str:
    verdict = facts.bottleneck
    if facts.newest_ranks and verdict is not None:
        attempt = name_attempt_of_steps(verdict.attempt, verdict.is_of_last_attempt)
        return f"the newest of {attempt}, without its first ones"
    return "the first ones included"


def _find_layout_of_steps(facts: RunFacts) -> dict[str, int]:
    """The layout with which the attempt began whose steps are shown."""
    verdict = facts.bottleneck
    for attempt in facts.attempts:
        is_shown = verdict is not None and attempt.number == verdict.attempt
        if is_shown and attempt.started is not None:
            return dict(attempt.started.layout)
    return dict(facts.layout)


def _measure(part: _Part, ranks: Sequence[RankPhaseSeconds]) -> float:
    seconds = [sum(rank.mean_groups_s.get(group, 0.0) for group in part.groups) for rank in ranks]
    return min(seconds) if part.is_of_least_rank else fmean(seconds)


def _build_row(name: str, predicted_s: float, measured_s: float) -> list[Html | str]:
    error = "–"
    if measured_s > 0 and predicted_s > 0:
        error = f"{100 * (predicted_s / measured_s - 1):+.0f} %"
    shown = (formats.format_milliseconds(seconds) for seconds in (predicted_s, measured_s))
    return [name, *shown, error]
