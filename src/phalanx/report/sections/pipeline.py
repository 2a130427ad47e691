"""The pipeline of a run: one step, planned above measured, what its ranks wait for, and its
stages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from phalanx.core.errors import LayoutError
from phalanx.plan.pipeline.bubble import MAX_BUBBLE_WITHOUT_WARNING
from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.plan.pipeline.simulate import (
    StageCosts,
    Timeline,
    count_peak_in_flight,
    simulate_timeline,
)
from phalanx.plan.pipeline.trace import build_measured_timeline, sum_forward_backward_s
from phalanx.report import formats
from phalanx.report.bubble import MeasuredPipeline, parse_pipeline_of_plan
from phalanx.report.facts import RunFacts
from phalanx.report.markup import Html, build_table, build_tag
from phalanx.report.pipeline_chart import draw_timeline_chart


def has_pipeline(facts: RunFacts) -> bool:
    return isinstance(facts.plan.get("pipeline"), dict)


def render_pipeline(facts: RunFacts) -> Html | None:
    """The section; None for a run without a pipeline."""
    if not has_pipeline(facts):
        return None
    pipeline = parse_pipeline_of_plan(facts.plan)
    event = facts.pipelines[-1] if facts.pipelines else None
    measured = MeasuredPipeline.from_event(event, facts.plan, facts.run_dir)
    timeline = _build_timeline_of_plan_ranks(measured)
    if pipeline is None:
        text = (
            "plan.json has a pipeline that cannot be shown: it is too large, or not of this"
            " release."
        )
        body: list[Html | None] = [build_tag("p", text, class_="note")]
    elif measured is None or timeline is None:
        body = _render_plan_only(pipeline)
    else:
        body = [
            *_describe_idle_time(measured, facts),
            *_render_timeline_chart(measured, timeline),
            _render_stage_table(pipeline, measured, timeline),
        ]
    return build_tag("section", build_tag("h2", "The pipeline"), body, id="pipeline")


def _build_timeline_of_plan_ranks(measured: MeasuredPipeline | None) -> Timeline | None:
    """The measured timeline; None if its ranks and stages are not those of the plan."""
    if measured is None:
        return None
    try:
        timeline = build_measured_timeline(measured.pipeline.schedule_name, measured.event.spans)
    except LayoutError:
        return None
    if timeline.schedule.rank_of_stage != measured.pipeline.rank_of_stage:
        return None
    return timeline


def _render_plan_only(pipeline: Pipeline) -> list[Html | None]:
    note = "Nothing was measured: steps 5, 50, 500, ... and the last are, when they are done."
    planned = pipeline.timeline()
    if planned is None:
        return [
            build_tag(
                "p", f"{note} How long its stages take was not predicted either.", class_="note"
            )
        ]
    summary = (
        f"Planned: ranks wait {formats.format_percent(float(planned.bubble), 1.0)} of the step for"
        f" other stages. {note}"
    )
    chart = draw_timeline_chart(planned, title="One step, planned", in_seconds=False)
    return [
        build_tag("p", _keep_percent_on_line(summary)),
        chart,
        _render_stage_table(pipeline, None, planned),
    ]


def _describe_idle_time(measured: MeasuredPipeline, facts: RunFacts) -> list[Html | None]:
    event = measured.event
    summary = f"At step {event.step:,} {measured.describe_wait()}."
    if math.isfinite(event.bubble_planned):
        summary += f" The plan said {formats.format_percent(event.bubble_planned, 1.0)}."
    css_class = None
    if measured.has_long_bubble:
        css_class = "over"
        summary += f" That is more than {100 * MAX_BUBBLE_WITHOUT_WARNING:.0f} %."
    earlier = []
    for each in facts.pipelines[:-1]:
        earlier.append(f"{formats.format_percent(each.bubble_measured, 1.0)} at step {each.step:,}")
    if earlier:
        summary += f" Before: {', '.join(earlier)}."
    paragraph = build_tag("p", build_tag("span", _keep_percent_on_line(summary), class_=css_class))
    advice = [build_tag("li", _keep_percent_on_line(line)) for line in measured.suggest_remedies()]
    if not advice:
        return [paragraph]
    return [paragraph, build_tag("ul", advice)]


def _keep_percent_on_line(text: str) -> str:
    """A number stays on the line of its sign."""
    return text.replace(" %", "\u00a0%")


def _render_timeline_chart(measured: MeasuredPipeline, timeline: Timeline) -> list[Html | None]:
    planned = measured.plan_timeline()
    if planned is None:
        planned = simulate_timeline(measured.pipeline.schedule(), measured.costs)
        how = (
            "the schedule with stages that take what they were measured to take: the plan had no"
            " costs of its own"
        )
    else:
        how = (
            "the schedule with the plan's costs of stages, scaled so that their mean is the mean"
            " that was measured"
        )
    note = (
        f"Planned: {how}. Nothing is charged for sending. Measured: computation on the host's"
        " clock, of the first data-parallel and tensor-parallel rank of each stage; waiting for"
        " other stages is left blank."
    )
    chart = draw_timeline_chart(
        planned, timeline, f"Step {measured.event.step:,}, planned above measured"
    )
    return [chart, build_tag("p", note, class_="note")]


def _render_stage_table(
    pipeline: Pipeline, measured: MeasuredPipeline | None, timeline: Timeline
) -> Html:
    """A row per stage: its blocks, what it takes, and the microbatches whose activations it
    holds."""
    if measured is None:
        columns = _build_planned_columns(pipeline)
        kind_of_times = "Predicted."
    else:
        columns = _build_measured_columns(measured, timeline)
        kind_of_times = "Of one microbatch, means of the step."
    columns = {
        "stage": list(map(str, range(pipeline.num_stages))),
        "rank": list(map(str, pipeline.rank_of_stage)),
        "blocks": list(map(str, pipeline.stages.num_blocks)),
    } | columns
    rows = zip(*columns.values(), strict=True)
    note = (
        f"{kind_of_times} The first stage has the embedding as well, the last one the head. Held:"
        " microbatches whose activations wait for their backward; the bytes of each rank are under"
        " Memory."
    )
    return build_tag(
        "div",
        build_tag("h3", "Stages"),
        build_table(columns, rows, css_class="num"),
        build_tag("p", note, class_="note"),
        class_="block",
    )


def _build_planned_columns(pipeline: Pipeline) -> dict[str, list[str]]:
    return {
        "÷ mean": _format_shares_of_mean(pipeline.costs),
        "held at most": list(map(str, count_peak_in_flight(pipeline.schedule()).per_stage)),
    }


def _build_measured_columns(measured: MeasuredPipeline, timeline: Timeline) -> dict[str, list[str]]:
    """Text by stage below the head of each column."""
    costs = measured.costs
    seconds = {"forward": [cost.forward_s for cost in costs]}
    if measured.event.splits_backward and any(cost.backward_weight_s for cost in costs):
        seconds["backward, inputs"] = [cost.backward_input_s for cost in costs]
        seconds["backward, weights"] = [cost.backward_weight_s for cost in costs]
    else:
        seconds["backward"] = [cost.backward_input_s + cost.backward_weight_s for cost in costs]
    seconds["in all"] = list(map(sum_forward_backward_s, costs))
    columns = {}
    for head, values in seconds.items():
        columns[head] = [formats.format_milliseconds(float(value)) for value in values]
    planned = count_peak_in_flight(measured.pipeline.schedule()).per_stage
    columns["÷ mean"] = _format_shares_of_mean(costs)
    columns["held at most, planned"] = list(map(str, planned))
    columns["held at most, measured"] = list(
        map(str, count_peak_in_flight(timeline.schedule).per_stage)
    )
    return columns


def _format_shares_of_mean(costs: Sequence[StageCosts]) -> list[str]:
    """The seconds of each stage over the mean of all, as text."""
    totals = list(map(sum_forward_backward_s, costs))
    mean_s = sum(totals) / len(totals)
    if not mean_s:
        return ["–"] * len(totals)
    return [f"{total / mean_s:.2f}" for total in totals]
