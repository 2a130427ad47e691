"""Where the time went: the whole run, a step of each rank, and the steps of rank 0 one after
another."""

from __future__ import annotations

from phalanx.observe.time_groups import TIME_GROUPS
from phalanx.report import formats
from phalanx.report.bars import draw_stacked_bar
from phalanx.report.bottleneck.cause import Cause
from phalanx.report.bottleneck.describe import (
    describe_basis,
    describe_bottleneck,
    describe_gain,
    describe_share,
    describe_utilization,
)
from phalanx.report.charts import StackChart, draw_stack_chart
from phalanx.report.facts import RankPhaseSeconds, RunFacts, WallTimeBreakdown
from phalanx.report.figure import draw_legend
from phalanx.report.markup import Html, build_table, build_tag
from phalanx.report.sections.curves import find_step_range
from phalanx.report.sections.ledger import render_ledgers
from phalanx.report.sections.predicted_step import render_predicted_step

MAX_SHOWN_RANKS = 32

# Colours stay what they were when a group comes between others.
_CSS_CLASS_OF_LATER_GROUP = {"pipeline": "g10"}
CSS_CLASS_OF_GROUP = {
    name: f"g{index}"
    for index, name in enumerate(
        name for name in TIME_GROUPS if name not in _CSS_CLASS_OF_LATER_GROUP
    )
} | _CSS_CLASS_OF_LATER_GROUP
CSS_CLASS_OF_LEDGER_ENTRY = {
    "training steps": "g1",
    "waiting for data": "g0",
    "waiting for other stages": "g10",
    "skipped steps": "g4",
    "checkpoints": "g5",
    "evaluation": "g6",
    "steps done again": "g3",
    "starting": "g7",
    "restart": "g12",
    "failure": "g12 striped",
    "other phases": "g8",
    "ending": "g7 striped",
    "everything else": "g9",
}


def render_time(facts: RunFacts) -> Html:
    if not facts.ranks:
        body: list[Html] = [build_tag("p", "No step is on record: not measured.", class_="note")]
    else:
        body = [
            _render_bottleneck(facts),
            *_render_prediction(facts),
            render_ledgers(facts) if facts.rank_ledgers else _render_wall_time(facts),
            _render_rank_times(facts),
            _render_time_chart(facts),
        ]
    return build_tag("section", build_tag("h2", "Where the time went"), body, id="time")


def _render_prediction(facts: RunFacts) -> list[Html]:
    section = render_predicted_step(facts)
    return [] if section is None else [section]


def _render_bottleneck(facts: RunFacts) -> Html:
    """The verdict: the sentence, each cause with its evidence and gain, and what was looked at."""
    verdict = facts.bottleneck
    if verdict is None:
        return build_tag("div")
    children = [
        build_tag("h3", "What bounds a step"),
        build_tag("p", build_tag("strong", f"{describe_bottleneck(verdict)}.")),
    ]
    children += [_render_cause(cause) for cause in verdict.causes]
    if utilization := describe_utilization(verdict):
        children.append(build_tag("p", f"{utilization}.", class_="note"))
    if verdict.num_steps:
        basis = f"Looked at: {describe_basis(verdict)}."
        if verdict.causes:
            basis += " “Without it” is the same steps simulated again."
        children.append(build_tag("p", basis, class_="note"))
    for text in verdict.not_judged:
        children.append(build_tag("p", f"Not judged: {text}.", class_="note"))
    return build_tag("div", children, class_="block")


def _render_cause(cause: Cause) -> Html:
    """One cause: its share, what its absence gives, the evidence, and what to do."""
    title = f"{cause.subject}: {describe_share(cause)}"
    if cause.kind != "compute":
        title += f", {describe_gain(cause)} without it"
    lines = [*cause.evidence, f"next: {cause.action}"]
    return build_tag(
        "div",
        build_tag("p", title),
        build_tag("ul", [build_tag("li", line) for line in lines], class_="note"),
    )


def _render_wall_time(facts: RunFacts) -> Html:
    ledger = facts.ledger
    texts, shown, rows = {}, [], []
    for name, part_s in ledger.parts_s.items():
        seconds, share = (
            formats.format_seconds_or_missing(part_s),
            formats.format_percent(part_s, ledger.wall_s),
        )
        texts[name] = f"{seconds} ({share})"
        rows.append([name, seconds, share])
        if part_s > 0:
            shown.append(name)
    # By construction: the parts of a `Ledger` sum to `wall_s`.
    rows.append(["sum", formats.format_seconds_or_missing(ledger.wall_s), "100.0 %"])
    return build_tag(
        "div",
        build_tag(
            "h3",
            f"The whole run: {formats.format_seconds_or_missing(ledger.wall_s)} of rank"
            f" {facts.lead_rank}",
        ),
        draw_stacked_bar(ledger.parts_s, CSS_CLASS_OF_LEDGER_ENTRY, ledger.wall_s, texts),
        draw_legend(shown, CSS_CLASS_OF_LEDGER_ENTRY),
        build_tag("p", _describe_everything_else(ledger), class_="note"),
        build_tag(
            "details",
            build_tag("summary", "Data table"),
            build_table(["part", "seconds", "share"], rows, css_class="num"),
        ),
        class_="block",
    )


def _describe_everything_else(ledger: WallTimeBreakdown) -> str:
    text = (
        "“Everything else” is what lies between the steps: waiting for a restart, generating text,"
        " stopping"
    )
    if "starting" not in ledger.parts_s:
        text += "; and starting, of which nobody said here how long it took"
    return f"{text}."


def _render_rank_times(facts: RunFacts) -> Html:
    ranks = _choose_shown_ranks(facts.ranks)
    full_s = max(map(_compute_bar_length_s, ranks))
    used = [name for name in TIME_GROUPS if _is_group_used(name, ranks)]
    rows = [_render_rank_time(rank, full_s) for rank in ranks]
    head = ["rank", "mean step by phase", "steps", "mean", "p50", "p99", "longest", "unaccounted"]
    left_out = len(facts.ranks) - len(ranks)
    note = (
        "Over every step a rank ran, the first ones and steps done again included. p50 is the"
        " median; p99: 99 % of the steps took no longer, which of fewer than 100 steps is the"
        " longest. Unaccounted is the time of a step that no phase claims."
    )
    zero_stage = formats.number_or_nan(facts.plan.get("zero_stage"))
    if facts.plan.get("device") == "cuda" and zero_stage >= 2:
        note += (
            " What a GPU waits for gathered weights and scattered gradients is a part of forward"
            " and backward: FSDP's own streams are not timed, and “collective” does not have it."
        )
    if left_out:
        note += (
            f" Shown are rank {ranks[0].rank} and the slowest of the others; {left_out} ranks are"
            " left out."
        )
    return build_tag(
        "div",
        build_tag("h3", "A step of each rank"),
        build_tag("p", _describe_step_time(facts.ranks[0]), class_="note"),
        draw_legend(used, CSS_CLASS_OF_GROUP),
        build_table(head, rows),
        build_tag("p", note, class_="note"),
        build_tag("details", build_tag("summary", "Data table"), _build_phase_table(ranks, used)),
        class_="block",
    )


def _compute_bar_length_s(rank: RankPhaseSeconds) -> float:
    """The longer of the mean step and its phases: those of a save lie outside of steps."""
    phases_s = sum(value for value in rank.mean_groups_s.values() if value > 0)
    return max(rank.mean_s, phases_s)


def _is_group_used(group: str, ranks: list[RankPhaseSeconds]) -> bool:
    return any(rank.mean_groups_s[group] > 0 for rank in ranks)


def _choose_shown_ranks(ranks: list[RankPhaseSeconds]) -> list[RankPhaseSeconds]:
    if len(ranks) <= MAX_SHOWN_RANKS:
        return ranks
    slowest = sorted(ranks[1:], key=lambda rank: rank.mean_s, reverse=True)[: MAX_SHOWN_RANKS - 1]
    return [ranks[0], *sorted(slowest, key=lambda rank: rank.rank)]


def _render_rank_time(rank: RankPhaseSeconds, full_s: float) -> list[Html | str]:
    texts = {name: formats.format_milliseconds(value) for name, value in rank.mean_groups_s.items()}
    unaccounted = rank.mean_groups_s["unaccounted"]
    share = formats.format_percent(unaccounted, rank.mean_s)
    spare = f"{formats.format_milliseconds(unaccounted)} ({share})"
    bar = draw_stacked_bar(rank.mean_groups_s, CSS_CLASS_OF_GROUP, full_s, texts)
    times = [rank.mean_s, rank.p50_s, rank.p99_s, rank.max_s]
    return [
        str(rank.rank),
        build_tag("div", bar, class_="bars"),
        f"{rank.num_steps:,}",
        *[formats.format_milliseconds(value) for value in times],
        spare,
    ]


def _describe_step_time(rank: RankPhaseSeconds) -> str:
    shares = sorted(rank.mean_groups_s.items(), key=lambda item: item[1], reverse=True)
    largest = []
    for name, value in shares[:3]:
        if value > 0:
            largest.append(f"{name} {formats.format_percent(value, rank.mean_s)}")
    if not largest:
        return "No phases were measured."
    return f"Most of a step of rank {rank.rank} is {', '.join(largest)}."


def _build_phase_table(ranks: list[RankPhaseSeconds], used: list[str]) -> Html:
    rows = []
    for rank in ranks:
        means_s = [*[rank.mean_groups_s[name] for name in used], rank.mean_s]
        milliseconds = [f"{1e3 * mean_s:.3f}" for mean_s in means_s]
        rows.append([str(rank.rank), f"{rank.num_steps:,}", *milliseconds])
    head = ["rank", "steps", *[f"{name} (ms)" for name in used], "whole step (ms)"]
    return build_table(head, rows, css_class="num", caption="Mean milliseconds per step.")


def _render_time_chart(facts: RunFacts) -> Html:
    parts = {}
    for name, column in facts.steps.groups_s.items():
        parts[name] = [1e3 * seconds for seconds in column]
    chart = StackChart(
        title=f"Step time of rank {facts.lead_rank}",
        y_label="milliseconds per step",
        unit="ms",
        xs=facts.steps.step,
        parts=parts,
        classes=CSS_CLASS_OF_GROUP,
        x_range=find_step_range(facts),
        note="Each column is the mean of its steps.",
    )
    return draw_stack_chart(chart)
