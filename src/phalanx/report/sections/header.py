"""The top of the page: what the run is, how it ended, and the ten numbers one asks for first."""

from __future__ import annotations

import math

from phalanx.core.units import plural
from phalanx.observe import events
from phalanx.observe.failure_rate import bound_time_between_failures
from phalanx.report import formats
from phalanx.report.bars import draw_stacked_bar
from phalanx.report.facts import MAX_SHOWN_WARNINGS, NOUN_OF_BYTES_SENT_OVER_AXIS, RunFacts
from phalanx.report.figure import draw_legend
from phalanx.report.markup import Html, build_small_text, build_tag
from phalanx.report.reliability import Reliability
from phalanx.report.run_status import describe_last_failure, find_job_of_run
from phalanx.report.sections.raw import draw_why_link
from phalanx.report.sections.timing import CSS_CLASS_OF_LEDGER_ENTRY

_CSS_CLASS_OF_STATUS = {
    "finished": "finished",
    "failed": "bad",
    "interrupted": "bad",
    "preempted": "open",
}
_METRIC_UNITS = ("nats/token", "tokens/s", "targets/s")  # set smaller than the number before them
MAX_SHOWN_HOURS = 6
# By tile: the key of the event lines behind its number.
_KEY_OF_TILE = {
    "Steps done": "loss",
    "Final training loss": "loss",
    "Training loss": "loss",
    "Held-out loss": "held-out",
    "Wall time": "wall",
    "Restarts": "restarts",
    "Time between failures": "restarts",
    "Goodput": "restarts",
    "Resumes": "resumes",
    "Skipped steps": "skips",
    "Layout": "layout",
    "Waiting for other stages": "pipeline",
}


def name_run(facts: RunFacts) -> str:
    """The run's name, and that of its directory, which tells runs of one name apart."""
    directory = facts.run_dir.resolve().name
    if facts.name in directory:
        return directory
    return f"{facts.name} ({directory})"


def name_status(facts: RunFacts) -> str:
    """The status of a run; "running" of one without an end whose job is alive."""
    job = find_job_of_run(facts)
    if job is not None and job.is_alive:
        return "running"
    return facts.status


def render_header(facts: RunFacts) -> Html:
    status_class = _CSS_CLASS_OF_STATUS.get(facts.status, "open")
    return build_tag(
        "header",
        build_tag(
            "div",
            build_tag("h1", facts.name),
            build_tag("span", name_status(facts), class_=f"status {status_class}"),
            class_="name",
        ),
        build_tag("p", _describe_start_and_duration(facts), class_="when"),
        _render_failure(facts),
        build_tag(
            "dl", [_render_key_value(facts, *key) for key in _list_run_tiles(facts)], class_="keys"
        ),
        _render_goodput(facts),
        [
            build_tag("p", text, class_="note warning")
            for text in facts.warnings[:MAX_SHOWN_WARNINGS]
        ],
    )


def _render_failure(facts: RunFacts) -> Html | None:
    failure = describe_last_failure(facts)
    if not failure:
        return None
    return build_tag("p", failure, class_="note warning")


def _render_key_value(facts: RunFacts, name: str, value: str, detail: str = "") -> Html:
    unit = next((unit for unit in _METRIC_UNITS if value.endswith(unit)), "")
    children: list[Html | str] = [value.removesuffix(unit)]
    if unit:
        children.append(build_tag("span", unit, class_="unit"))
    why = draw_why_link(facts, _KEY_OF_TILE.get(name, ""), name)
    return build_tag(
        "div", build_tag("dt", name), build_tag("dd", children, build_small_text(detail), why)
    )


def _render_goodput(facts: RunFacts) -> Html | None:
    """The share of the run's life that went into steps which stand, and what took the rest."""
    ledger = facts.ledger
    good_s = ledger.good_s
    if not (ledger.wall_s > 0 and good_s > 0):
        return None
    texts = {}
    for name, part_s in ledger.parts_s.items():
        seconds = formats.format_seconds_or_missing(part_s)
        texts[name] = f"{seconds} ({formats.format_percent(part_s, ledger.wall_s)})"
    used = [name for name, part_s in ledger.parts_s.items() if part_s > 0]
    return build_tag(
        "div",
        build_tag(
            "p",
            build_tag("strong", f"Goodput {formats.format_percent(good_s, ledger.wall_s)}"),
            ": the part of the run's life that went into steps which stand, without their waiting"
            " for data, saving and evaluating. ",
            build_tag("a", "Where the time went", href="#time"),
        ),
        draw_stacked_bar(ledger.parts_s, CSS_CLASS_OF_LEDGER_ENTRY, ledger.wall_s, texts),
        draw_legend(used, CSS_CLASS_OF_LEDGER_ENTRY),
        class_="goodput",
    )


def _describe_start_and_duration(facts: RunFacts) -> str:
    if not facts.num_events:
        if facts.reading_gaps:
            return "None of the events of this run can be read."
        return "This run has written no events yet."
    started = formats.format_timestamp(facts.started_unix_s)
    when = f"Started {started}, last event {formats.format_timestamp(facts.last_unix_s)}."
    if facts.is_finished:
        return when
    job = find_job_of_run(facts)
    if job is None:
        return f"{when} No end was recorded, and no job of it ran here when this page was made."
    if job.is_alive:
        return f"{when} It was running when this page was made."
    return f"{when} No end was recorded; whether it runs could not be seen from here."


def _list_run_tiles(facts: RunFacts) -> list[tuple[str, str, str]]:
    loss, of_step, median = math.nan, "", ""
    if facts.final_loss is not None:
        last_step, loss = facts.final_loss
        of_step = f"of step {last_step:,}"
    if len(facts.steps):
        median = f"median of {plural(len(facts.steps), 'step')}"
    redone, rolled_back = "", ""
    if facts.num_redone:
        redone = f"{plural(facts.num_redone, 'step')} done again"
        rolled_back = f"{plural(facts.num_rolled_back, 'step')} rolled back"
    held_out, against = _describe_held_out_loss(facts)
    devices = facts.device
    if facts.world_size:
        devices = f"{facts.world_size} x {facts.device}"
    tiles = [
        ("Steps done", _describe_steps_done(facts), redone),
        (
            "Final training loss" if facts.is_finished else "Training loss",
            formats.format_loss(loss, facts.units.loss),
            of_step,
        ),
        ("Held-out loss", held_out, against),
        ("Throughput", _describe_throughput(facts), median),
        ("Wall time", formats.format_seconds_or_missing(facts.wall_s), ""),
        ("Restarts", str(facts.num_restarts), rolled_back),
        *_list_reliability_tiles(facts.reliability),
    ]
    if facts.num_resumes:
        tiles.append(("Resumes", str(facts.num_resumes), ""))
    tiles += [
        ("Skipped steps", str(len(facts.skipped)), _describe_undone_skips(facts)),
        ("Layout", formats.format_layout(dict(facts.layout)), devices),
        *_list_sent_bytes_tiles(facts),
        *_list_pipeline_tiles(facts),
    ]
    if facts.describe_sent_gradients:
        amount, _, share = facts.describe_sent_gradients.partition(", ")
        tiles.append(("Gradients sent", amount, share))
    return tiles


def _list_reliability_tiles(reliability: Reliability) -> list[tuple[str, str, str]]:
    """A tile of how often the run failed, and how often it should save because of that; none
    without failures."""
    if not reliability.num_failures:
        return []
    least_s, most_s = bound_time_between_failures(reliability.num_failures, reliability.alive_s)
    between = formats.format_seconds_or_missing(reliability.mean_between_failures_s)
    least = formats.format_seconds_or_missing(least_s)
    interval = f"{least} to {formats.format_seconds_or_missing(most_s)} with 95 % confidence"
    if reliability.num_failures == 1:
        # One alone gives no rate.
        between, interval = f"at least {least}", "with 95 % confidence"
    alive = formats.format_seconds_or_missing(reliability.alive_s)
    remark = f"{interval}; {plural(reliability.num_failures, 'failure')} in {alive}"
    if reliability.num_cut_off:
        remark += f", without {plural(reliability.num_cut_off, 'command')} cut off without a word"
    if math.isfinite(reliability.best_save_every_s):
        best = formats.format_seconds_or_missing(reliability.best_save_every_s)
        remark += f"; if failures go on like that, Young and Daly want a save every {best}"
        if math.isfinite(reliability.save_every_s):
            now = formats.format_seconds_or_missing(reliability.save_every_s)
            remark += f", saves came every {now} (median)"
    if math.isfinite(reliability.participation) and reliability.participation < 1:
        remark += (
            f"; {formats.format_percent(reliability.participation, 1.0)} of the ranks took part"
        )
    return [("Time between failures", between, remark), *_list_goodput_tiles(reliability)]


def _list_goodput_tiles(reliability: Reliability) -> list[tuple[str, str, str]]:
    """A tile of the goodput of the run, with its newest hours."""
    if not math.isfinite(reliability.goodput):
        return []
    share = formats.format_percent(reliability.goodput, 1.0)
    newest = reliability.hours[-MAX_SHOWN_HOURS:]
    by_hour = ", ".join(formats.format_percent(hour.goodput, 1.0) for hour in newest)
    remark = "of the run's life in steps that stand, without their waits for data and saves"
    if len(reliability.hours) > 1:
        remark += f"; its newest hours: {by_hour}"
    return [("Goodput", share, remark)]


def _describe_undone_skips(facts: RunFacts) -> str:
    """The skips that do not count, as their steps were done again."""
    told = sum(isinstance(each.event, events.StepSkipped) for each in facts.story)
    if told <= len(facts.skipped):
        return ""
    return f"of the steps that stand; {told - len(facts.skipped)} more were done again"


def _describe_steps_done(facts: RunFacts) -> str:
    if not facts.num_events:
        return "none"
    if facts.total_steps is None:
        return f"{facts.last_step:,}"
    return f"{facts.last_step:,} / {facts.total_steps:,}"


def _describe_throughput(facts: RunFacts) -> str:
    if not math.isfinite(facts.tokens_per_s):
        return formats.NOT_MEASURED_TEXT
    return f"{formats.format_rounded_count(facts.tokens_per_s)} {facts.units.rate_unit}"


def _list_sent_bytes_tiles(facts: RunFacts) -> list[tuple[str, str, str]]:
    tiles = []
    for axis, noun in NOUN_OF_BYTES_SENT_OVER_AXIS.items():
        amount = facts.describe_sent_over(axis)
        if amount:
            tiles.append((f"Sent over {axis}", amount, f"{noun} and their gradients"))
    return tiles


def _list_pipeline_tiles(facts: RunFacts) -> list[tuple[str, str, str]]:
    if not facts.pipelines:
        return []
    last = facts.pipelines[-1]
    expected = (
        f"predicted {formats.format_percent(last.bubble_predicted, 1.0)}, of step {last.step:,}"
    )
    return [
        ("Waiting for other stages", formats.format_percent(last.bubble_measured, 1.0), expected)
    ]


def _describe_held_out_loss(facts: RunFacts) -> tuple[str, str]:
    """The last evaluation, the best one if that is another, and how far it stands from each
    n-gram model."""
    if not facts.evals:
        return formats.NOT_MEASURED_TEXT, ""
    last, best = facts.evals[-1], facts.find_best_evaluation
    remarks = []
    if best is not None and best.step != last.step:
        remarks.append(f"best {formats.describe_compared_metric(best)} at step {best.step:,}")
    elif len(facts.evals) > 1:
        remarks.append(f"the best of {len(facts.evals)} evaluations")
    remarks += [f"{name} {value:.4f}" for name, value in last.metrics.items()]
    for baseline in facts.baselines:
        gap = last.loss - baseline.loss
        if math.isfinite(gap):
            side = "above"
            if gap < 0:
                side = "below"
            remarks.append(f"{abs(gap):.3f} nats {side} {baseline.name} ({baseline.loss:.3f})")
    return formats.format_loss(last.loss, facts.units.loss), "; ".join(remarks)
