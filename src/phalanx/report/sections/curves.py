"""The curves over steps: loss, learning rate, gradient norm, throughput, memory in use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from phalanx.core.units import MIB, plural
from phalanx.observe import events
from phalanx.report import formats
from phalanx.report.charts import (
    NAME_OF_LINE_MARK,
    ChartSeries,
    EventMark,
    LineChart,
    ReferenceLine,
    draw_line_chart,
)
from phalanx.report.facts import RunFacts
from phalanx.report.markup import Html, build_tag
from phalanx.report.sample import compute_running_mean, compute_running_median

MAX_SHOWN_SOURCES = 6
MAX_SHOWN_METRICS = 8
MAX_NAME_CHARS = 32


def render_curves(facts: RunFacts, lanes: Html | None = None) -> Html:
    """The section; `lanes` go under the loss, on its axis."""
    return build_tag(
        "section",
        build_tag("h2", "Training"),
        draw_loss_chart(facts),
        lanes,
        *draw_metric_charts(facts),
        build_tag(
            "div", draw_learning_rate_chart(facts), draw_gradient_norm_chart(facts), class_="pair"
        ),
        build_tag(
            "div", draw_throughput_chart(facts), draw_resident_memory_chart(facts), class_="pair"
        ),
        id="training",
    )


def find_step_range(facts: RunFacts) -> tuple[float, float] | None:
    """One step axis for all charts of a page, so that they can be read one above the other."""
    if not len(facts.steps):
        return None
    at: list[float] = [
        *facts.steps.step[:1],
        *facts.steps.step[-1:],
        *[event.step for event in facts.evals],
    ]
    for envelope in facts.story:
        # The failure that ended the run is in a step that nobody finished.
        if isinstance(envelope.event, events.RankFailed | events.HangFound):
            at.append(max(float(envelope.event.step), min(at)))
    return float(min(at)), float(max(at))


# What the supervisor said before it started ranks again.
_KIND_OF_MARK: dict[type[events.Event], str] = {
    events.RestartScheduled: "restart",
    events.RolledBack: "back",
    events.LayoutChanged: "layout",
}

_TITLE_OF_MARK = {
    "restart": "restart",
    "back": "went back",
    "layout": "other layout",
    "resume": "resume",
}


def list_restart_marks(facts: RunFacts) -> list[EventMark]:
    """Marks at the first steps of later attempts: after a failure, of ranks that went back or
    became more or fewer, or because a person resumed. Each kind has its own numbers."""
    kind_of_attempt: dict[int, str] = {}
    for envelope in facts.story:
        kind = _KIND_OF_MARK.get(type(envelope.event))
        if kind is not None:
            kind_of_attempt[envelope.attempt + 1] = kind
    marks, numbers = [], dict.fromkeys(NAME_OF_LINE_MARK, 0)
    for attempt in facts.attempts[1:]:
        if attempt.first_step is not None:
            kind = "resume"
            if attempt.is_restart:
                kind = kind_of_attempt.get(attempt.number, "restart")
            numbers[kind] += 1
            marks.append(
                EventMark(
                    kind, float(attempt.first_step), f"{_TITLE_OF_MARK[kind]} {numbers[kind]}"
                )
            )
    return marks


def list_skipped_step_marks(
    facts: RunFacts, steps: Sequence[float], values: Sequence[float]
) -> list[EventMark]:
    """Crosses at the value the skipped step had, or on the floor where that is not a number."""
    if not facts.skipped:
        return []
    value_at = dict(zip(steps, values, strict=True))
    marks = []
    for event in facts.skipped:
        title = f"step {event.step} skipped: {event.reason}"
        marks.append(EventMark("skip", event.step, title, value_at.get(event.step, math.nan)))
    return marks


def _choose_smoothing_span(num_steps: int) -> int:
    return max(5, min(num_steps // 40, 1000))


def _build_series_with_median(steps: Sequence[float], values: Sequence[float]) -> list[ChartSeries]:
    """Each step, and a running median: it does not smear spikes that belong to one step only (a
    save, a burst)."""
    span = _choose_smoothing_span(len(steps))
    if len(steps) < span:
        return [ChartSeries("each step", steps, values, "s0")]
    usual = ChartSeries(f"median of {span}", steps, compute_running_median(values, span), "s0")
    return [ChartSeries("each step", steps, values, "raw"), usual]


def _build_series_with_mean(
    steps: Sequence[float], values: Sequence[float], end_label: str
) -> list[ChartSeries]:
    span = _choose_smoothing_span(len(steps))
    if len(steps) < span:
        return [ChartSeries("each step", steps, values, "s0", end_label=end_label)]
    name = f"mean of {span}"
    return [
        ChartSeries("each step", steps, values, "raw"),
        ChartSeries(name, steps, compute_running_mean(values, span), "s0", end_label=end_label),
    ]


def draw_loss_chart(facts: RunFacts) -> Html:
    steps = facts.steps
    series = _build_series_with_mean(steps.step, steps.loss, end_label="training")
    if facts.evals:
        label = f"held-out {facts.evals[-1].loss:.3f}"
        at, losses = [event.step for event in facts.evals], [event.loss for event in facts.evals]
        series.append(ChartSeries("held-out", at, losses, "eval", dots=True, end_label=label))
        series += _build_held_out_series_by_source(facts)
    chart = LineChart(
        title="Loss",
        y_label=facts.units.format_loss_with_unit,
        unit=facts.units.loss,
        series=series,
        references=_build_baseline_reference_lines(facts),
        marks=[*list_restart_marks(facts), *list_skipped_step_marks(facts, steps.step, steps.loss)],
        may_be_log=True,
        x_range=find_step_range(facts),
        note=_build_note_below_loss_chart(facts),
    )
    return draw_line_chart(chart)


def _build_baseline_reference_lines(facts: RunFacts) -> list[ReferenceLine]:
    """A line for each n-gram model, drawn in two ways by turns to tell neighbours apart."""
    references: list[ReferenceLine] = []
    for baseline in facts.baselines:
        if math.isfinite(baseline.loss):
            css_class = "ref"
            if len(references) % 2:
                css_class = "ref b"
            label = f"{baseline.name} {baseline.loss:.3f}"
            references.append(ReferenceLine(baseline.name, baseline.loss, label, css_class))
    return references


def _build_held_out_series_by_source(facts: RunFacts) -> list[ChartSeries]:
    """The held-out loss of each source of a mixture."""
    curves: dict[str, ChartSeries] = {}
    by_name = _group_columns_by_name([(event.step, event.loss_by_source) for event in facts.evals])
    for number, (name, (at, losses)) in enumerate(by_name[:MAX_SHOWN_SOURCES]):
        css_class = f"source d{number}"
        curves[name] = ChartSeries(
            f"held-out, {shorten_source_name(name)}", at, losses, css_class, dots=True
        )
    return list(curves.values())


def _group_columns_by_name(
    rows: Iterable[tuple[int, Mapping[str, float]]],
) -> list[tuple[str, tuple[list[int], list[float]]]]:
    """(name, (steps, values)) for each name, in the order in which names first came: not every
    evaluation has every one."""
    columns: dict[str, tuple[list[int], list[float]]] = {}
    for step, values in rows:
        for name, value in values.items():
            steps, column = columns.setdefault(name, ([], []))
            steps.append(step)
            column.append(value)
    return list(columns.items())


def draw_metric_charts(facts: RunFacts) -> list[Html]:
    """One chart for each metric of the user's objective."""
    by_name = _group_columns_by_name([(event.step, event.metrics) for event in facts.evals])
    charts = []
    for name, (at, values) in by_name[:MAX_SHOWN_METRICS]:
        label = f"held-out {values[-1]:.4f}"
        chart = LineChart(
            title=shorten_source_name(name),
            y_label=shorten_source_name(name),
            unit="",
            series=[ChartSeries("held-out", at, values, "eval", dots=True, end_label=label)],
            marks=list_restart_marks(facts),
            x_range=find_step_range(facts),
        )
        charts.append(draw_line_chart(chart))
    return charts


def shorten_source_name(name: str) -> str:
    """The end of a path or pattern, which is what tells sources apart."""
    if len(name) <= MAX_NAME_CHARS:
        return name
    return f"…{name[-MAX_NAME_CHARS + 1 :]}"


def _build_note_below_loss_chart(facts: RunFacts) -> str:
    sentences = []
    best, checkpoint = facts.find_best_evaluation, facts.kept_best
    if best is not None and len(facts.evals) > 1:
        sentence = (
            f"Best of {len(facts.evals):,} evaluations: {formats.describe_compared_metric(best)} at"
            f" step {best.step:,}"
        )
        if checkpoint is not None and checkpoint.step == best.step:
            sentence += f", kept as {checkpoint.checkpoint}"
        sentences.append(f"{sentence}.")
    if facts.num_rolled_back:
        verb = "was" if facts.num_rolled_back == 1 else "were"
        sentences.append(
            f"{plural(facts.num_rolled_back, 'step')} {verb} rolled back and"
            f" {facts.num_redone:,} done again; the curve shows the last attempt of each."
        )
    if facts.baselines:
        sentences.append(
            "Baselines are n-gram models fitted on the same training split, on the same held-out"
            " tokens."
        )
    return " ".join(sentences)


def draw_learning_rate_chart(facts: RunFacts) -> Html:
    series = [ChartSeries("learning rate", facts.steps.step, facts.steps.learning_rate)]
    return draw_line_chart(
        LineChart(
            "Learning rate", "learning rate", "", series, zero=True, x_range=find_step_range(facts)
        )
    )


def draw_gradient_norm_chart(facts: RunFacts) -> Html:
    steps = facts.steps
    chart = LineChart(
        title="Gradient norm",
        y_label="global L2 norm before clipping",
        unit="",
        series=_build_series_with_median(steps.step, steps.grad_norm),
        marks=[
            *list_restart_marks(facts),
            *list_skipped_step_marks(facts, steps.step, steps.grad_norm),
        ],
        zero=True,
        may_be_log=True,
        x_range=find_step_range(facts),
    )
    return draw_line_chart(chart)


def draw_throughput_chart(facts: RunFacts) -> Html:
    steps = facts.steps
    chart = LineChart(
        title="Throughput",
        y_label=f"{facts.units.items} per second",
        unit=facts.units.rate_unit,
        series=_build_series_with_median(steps.step, steps.tokens_per_s),
        marks=list_restart_marks(facts),
        zero=True,
        x_range=find_step_range(facts),
    )
    return draw_line_chart(chart)


def draw_resident_memory_chart(facts: RunFacts) -> Html:
    mib = [value / MIB for value in facts.steps.rss_bytes]
    series = [ChartSeries(f"rank {facts.lead_rank}", facts.steps.step, mib)]
    chart = LineChart(
        title=f"Resident memory of rank {facts.lead_rank}",
        y_label="MiB",
        unit="MiB",
        series=series,
        marks=list_restart_marks(facts),
        zero=True,
        x_range=find_step_range(facts),
        note=(
            "Pages that processes share count whole here, and by their share in the console's mem."
        ),
    )
    return draw_line_chart(chart)
