"""A drill as one self-contained page: all trials beside their bars, and for each run of this drill
its loss over that of the undisturbed run, with what struck and what was said below it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.files import write_bytes_atomically
from phalanx.core.units import format_seconds, plural
from phalanx.drills.campaign import TrialRow
from phalanx.drills.drive import DrillResult
from phalanx.drills.run_trial import FinishedTrial
from phalanx.report.charts import ChartSeries, LineChart, draw_line_chart
from phalanx.report.lanes import Lane, LaneMark, draw_lanes
from phalanx.report.markup import Html, build_table, build_tag
from phalanx.report.page import CONTENT_SECURITY_POLICY
from phalanx.report.scales import choose_scale

PAGE_FILE_NAME = "drill.html"
MAX_DRAWN_TRIALS = 60


def write_drill_page(folder: Path, result: DrillResult) -> Path:
    """Write the page of a drill into `folder`, and return its path. Raises ResourceError."""
    path = folder / PAGE_FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(path, render_drill_page(result).encode())
    except OSError as error:
        raise build_path_resource_error(error, "writing the page", path, place="--out") from None
    return path


def render_drill_page(result: DrillResult) -> str:
    """The page, as HTML text."""
    head = build_tag(
        "head",
        build_tag("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">'),
        build_tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        build_tag("title", f"Drill, {_describe_result(result)} · phalanx"),
        # Else a browser asks for /favicon.ico.
        build_tag("link", rel="icon", href="data:,"),
        build_tag("style", _read_asset("page.css")),
    )
    main = build_tag(
        "main",
        _render_trials(result),
        _render_confusion(result),
        _render_runs(result),
        id="main",
    )
    footer = build_tag(
        "footer", "Written by phalanx. This file is complete in itself and loads nothing."
    )
    body = build_tag(
        "body",
        build_tag("a", "Skip to the trials", href="#main", class_="skip-link"),
        build_tag("div", _render_header(result), main, footer, class_="page"),
        build_tag("script", _read_asset("page.js")),
    )
    return f"<!doctype html>\n{build_tag('html', head, body, lang='en')}\n"


def _read_asset(name: str) -> Html:
    # Html, not text: files of our own go into the page as they are.
    return Html(files("phalanx.report").joinpath(name).read_text("utf-8"))


def _describe_result(result: DrillResult) -> str:
    ran = [row for row in result.rows if not row.skipped]
    return f"{sum(row.is_passed for row in ran)} of {plural(len(ran), 'trial')} passed"


def _render_header(result: DrillResult) -> Html:
    css_class = "status finished" if result.is_passed else "status bad"
    where = ""
    if result.rows:
        now = result.rows[-1].circumstances
        where = f"phalanx {now.version} {now.commit}, {now.date}, {now.machine}."
    return build_tag(
        "header",
        build_tag(
            "div",
            build_tag("h1", "Drill"),
            build_tag("span", _describe_result(result), class_=css_class),
            class_="name",
        ),
        build_tag("p", where, class_="when"),
    )


def _render_trials(result: DrillResult) -> Html:
    rows = [_list_cells_of_trial(row) for row in result.rows]
    head = (
        "",
        "fault",
        "where",
        "said",
        "detected",
        "training again",
        "load",
        "lost",
        "bits",
        "goodput",
        "missed",
    )
    return build_tag(
        "section",
        build_tag("h2", "Trials"),
        build_tag("div", build_table(head, rows, css_class="top"), class_="wide"),
        build_tag("p", _explain_load(result), class_="note"),
        id="trials",
    )


def _explain_load(result: DrillResult) -> str:
    machine = f" ({result.rows[-1].circumstances.machine})" if result.rows else ""
    return (
        "Load: threads of the machine that ran or wanted to while the run went on, in the mean,"
        f" those of the run among them. Above the number of cores{machine} they wait for each"
        " other, and all takes longer."
    )


def _list_cells_of_trial(row: TrialRow) -> list[str]:
    position = f"rank {row.place.rank}, step {row.place.step}, {row.place.phase}"
    if row.sharing > 1:
        position += f" of a run of {row.sharing} trials"
    measured = row.measured
    if measured is None:
        return ["–", row.fault, position, f"skipped: {row.skipped}", *[""] * 7]
    verdict = measured.verdict
    if measured.ranks:
        verdict += f", rank {', '.join(map(str, measured.ranks))}"
    bits = {True: "equal", False: "different", None: "–"}[measured.is_bit_equal]
    goodput = "–" if measured.goodput is None else f"{measured.goodput:.0%}"
    missed = [f"{each.name} {each.found} (bar {each.bar})" for each in row.checks if not each.ok]
    return [
        "✓" if row.is_passed else "✕",
        row.fault,
        position,
        verdict,
        _format_seconds_or_dash(measured.detected_s),
        _format_seconds_or_dash(measured.trained_again_s),
        "–" if measured.load is None else f"{measured.load:.1f}",
        str(measured.lost_steps),
        bits,
        goodput,
        "; ".join(missed) or "–",
    ]


def _format_seconds_or_dash(seconds: float | None) -> str:
    return "–" if seconds is None else format_seconds(seconds)


def _render_confusion(result: DrillResult) -> Html | None:
    counts = result.confusion
    if not counts:
        return None
    verdicts = sorted({name for _, name in counts})
    rows = []
    for right in sorted({name for name, _ in counts}):
        rows.append([right, *[str(counts[right, name] or "") for name in verdicts]])
    return build_tag(
        "section",
        build_tag("h2", "What was said of what happened"),
        build_tag("div", build_table(["right class", *verdicts], rows), class_="wide"),
        id="classes",
    )


def _render_runs(result: DrillResult) -> Html | None:
    if not result.finished:
        return None
    drawn = result.finished[:MAX_DRAWN_TRIALS]
    note = ""
    if len(drawn) < len(result.finished):
        note = f"The first {len(drawn)} of {len(result.finished)} trials."
    return build_tag(
        "section",
        build_tag("h2", "Runs"),
        [_render_run(each) for each in drawn],
        build_tag("p", note, class_="note") if note else None,
        id="runs",
    )


def _render_run(finished: FinishedTrial) -> Html:
    straight, curve = finished.undisturbed_losses, finished.losses
    steps = sorted(straight)
    trial_place = finished.trial.place
    title = (
        f"{finished.trial.fault}: rank {trial_place.rank}, step {trial_place.step},"
        f" {trial_place.phase}"
    )
    x_range = (float(steps[0]), float(steps[-1]))
    chart = LineChart(
        title=title,
        y_label="loss",
        unit="",
        series=[
            _build_series("undisturbed", steps, straight, "s1"),
            _build_series("with the fault", steps, curve, "s0", end_label="with the fault"),
        ],
        x_range=x_range,
    )
    # As the chart above chooses it: ends exactly at the steps.
    lanes = draw_lanes("What happened", list_lanes(finished), choose_scale(x_range, snug=True))
    return build_tag("div", draw_line_chart(chart), lanes, class_="block")


def _build_series(
    name: str,
    steps: Sequence[int],
    losses: Mapping[int, float],
    css_class: str,
    *,
    end_label: str = "",
) -> ChartSeries:
    # A run that stopped has no loss at the steps behind that.
    values = [losses.get(step, math.nan) for step in steps]
    return ChartSeries(name, steps, values, css_class, end_label=end_label)


def list_lanes(finished: FinishedTrial) -> Sequence[Lane]:
    """The lanes of one run: its faults, its verdicts, and the steps from which it went on."""
    faults = [
        LaneMark(each.step, "✕", f"{each.fault} on rank {each.rank} in {each.phase}", "bad")
        for each in finished.strikes
    ]
    first_s = finished.strikes[0].monotonic_s if finished.strikes else 0.0
    verdicts = []
    for verdict in finished.verdicts:
        ranks = f", rank {', '.join(map(str, verdict.ranks))}" if verdict.ranks else ""
        after = format_seconds(max(0.0, verdict.monotonic_s - first_s))
        text = f"{verdict.kind}{ranks}, {after} after the first fault"
        verdicts.append(LaneMark(verdict.step, "!", text, "warn"))
    starts = [
        LaneMark(step, "↻", f"went on from step {step}", "calm") for step in finished.restarts
    ]
    return [Lane("faults", faults), Lane("said", verdicts), Lane("starts", starts)]
