"""Runs `phalanx drill`, shows how far it is, and prints a line for each trial with its misses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli._arguments import split_job_file_and_overrides
from phalanx.cli._json import print_errors_as_json, print_json
from phalanx.cli._launched import refuse_launcher
from phalanx.cli._output_files import require_writable_output
from phalanx.cli._progress import ProgressLine
from phalanx.cli._stops import telling_stops
from phalanx.core.errors import ExitCode, ResourceError, UsageError
from phalanx.core.units import format_seconds, plural

if TYPE_CHECKING:
    from phalanx.drills.campaign import TrialRow
    from phalanx.drills.drive import DrillProgress, DrillResult
    from phalanx.drills.judge import Measured, MeasuredAnswer


@dataclass(frozen=True)
class DrillOptions:
    """The options of `phalanx drill`, as given."""

    seed: int
    repeats: int
    num_steps: int
    campaign: Path | None
    out: Path | None
    run_limit_s: float | None
    redoes_changed: bool = False
    share: int = 1


def print_faults(*, as_json: bool) -> int:
    """Print all faults, and why some cannot run here. Returns 0."""
    from phalanx.drills.trials import list_faults

    faults = list_faults()
    if as_json:
        rows = [
            {
                "name": fault.name,
                "summary": fault.summary,
                "verdict": fault.expectation.verdict,
                "ending": fault.expectation.ending.value,
                "why_not": fault.why_not or None,
            }
            for fault in faults
        ]
        print_json("drill-faults", {"faults": rows}, indent=1)
        return 0
    for fault in faults:
        print(f"{fault.name:<16} {fault.summary}")
        if fault.why_not:
            print(f"{'':<16} skipped here: {fault.why_not}")
    return 0


def print_drill(arguments: Sequence[str], options: DrillOptions, *, as_json: bool) -> int:
    """Run a drill and print its rows. Returns the exit code: 11 if a bar is missed."""
    from phalanx.drills.drive import DrillRequest, run_drill
    from phalanx.drills.job import load_drilled_job
    from phalanx.drills.page import PAGE_FILE_NAME, write_drill_page
    from phalanx.drills.trials import choose_fault_names

    refuse_launcher("drill")
    with (
        print_errors_as_json(as_json),
        telling_stops(describe_stopped_drill(options.campaign)),
        ProgressLine("drilling", line_s=0.0) as line,
    ):
        if options.redoes_changed and options.campaign is None:
            raise UsageError("--again is for the trials of a campaign", fix="give --campaign FILE")
        if options.out is not None:
            require_writable_output(
                options.out / PAGE_FILE_NAME, "writing the page", option="--out"
            )
        words, rest = split_faults_from_job(arguments)
        job_file, overrides = split_job_file_and_overrides(rest)
        job = load_drilled_job(job_file, overrides, num_steps=options.num_steps)
        request = DrillRequest(
            job,
            choose_fault_names(words),
            options.seed,
            options.repeats,
            options.campaign,
            options.out,
            options.run_limit_s,
            redoes_changed=options.redoes_changed,
            share=options.share,
        )

        def show(progress: DrillProgress) -> None:
            words = f"{progress.num_done + 1}/{progress.num_runs}  {progress.running}"
            if progress.left_s is not None:
                words += f"  eta {format_seconds(progress.left_s)}"
            line.update(progress.num_done, progress.num_runs, instead=words)

        def show_row(row: TrialRow) -> None:
            if not as_json:
                line.hide()
                for text in describe_row(row):
                    print(text, flush=True)

        result = run_drill(request, on_progress=show, on_row=show_row)
    page, page_error = None, None
    if options.out is not None:
        try:
            page = write_drill_page(options.out, result)
        except ResourceError as error:
            page_error = error
    if as_json:
        print_json("drill", {**result.to_json(), "page": page and str(page)}, indent=1)
    else:
        for text in describe_result(result):
            print(text)
        if page is not None:
            print(f"page    {page}")
    if page_error is not None:
        # After what hours of trials have shown.
        raise page_error
    return int(ExitCode.OK if result.is_passed else ExitCode.VERIFICATION)


def describe_stopped_drill(campaign: Path | None) -> str:
    """What is left of a drill that was stopped, and how it goes on."""
    if campaign is not None:
        return f"the run that went on is ended; the same command goes on from {campaign}"
    return (
        "the run that went on is ended, and nothing is left of it; the same command begins again"
        " (with --campaign FILE it goes on from the trials that had ended)"
    )


def split_faults_from_job(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(names of faults, job file and overrides) of a command line."""
    from phalanx.core.registry import list_modules_of_registry
    from phalanx.drills.trials import ALL_FAULTS
    from phalanx.resilience.fault import FAULTS_PACKAGE

    faults, rest = [], []
    for argument in arguments:
        is_path_or_key = any(sign in argument for sign in "=./")
        known = [*list_modules_of_registry(FAULTS_PACKAGE), ALL_FAULTS]
        if argument in known or not is_path_or_key:
            faults.append(argument)
        else:
            rest.append(argument)
    return faults, rest


def describe_row(row: TrialRow) -> list[str]:
    """A trial in one line, and one more for each bar that it missed."""
    position = f"rank {row.place.rank}, step {row.place.step}, {row.place.phase}"
    if row.skipped:
        return [f"skipped {row.fault:<16} {row.skipped}"]
    measured = row.measured
    assert measured is not None
    if row.sharing > 1:
        position += f" of a run of {row.sharing}"
    parts = [position, *describe_answer(measured)]
    if measured.is_bit_equal is not None:
        parts.append("bits equal" if measured.is_bit_equal else "bits differ")
    if measured.goodput is not None:
        parts.append(f"goodput {measured.goodput:.0%}")
    if measured.load is not None:
        parts.append(f"load {measured.load:.1f}")
    word = "passed" if row.is_passed else "missed"
    lines = [f"{word:<7} {row.fault:<16} {'; '.join(parts)}"]
    lines += [
        f"{'':<24} {check.name}: {check.found}, bar {check.bar}"
        for check in row.checks
        if not check.ok
    ]
    return lines


def describe_answer(measured: Measured | MeasuredAnswer) -> list[str]:
    """What a fault was answered with: verdict, ranks, seconds and steps that were lost."""
    parts = [measured.verdict]
    if measured.ranks:
        parts.append("named rank " + ", ".join(map(str, measured.ranks)))
    if measured.detected_s is not None:
        parts.append(f"detected after {format_seconds(measured.detected_s)}")
    if measured.trained_again_s is not None:
        parts.append(f"training again after {format_seconds(measured.trained_again_s)}")
    parts.append(f"{plural(measured.lost_steps, 'step')} lost")
    return parts


def describe_result(result: DrillResult) -> list[str]:
    """The confusion matrix, and how many trials passed."""
    lines = []
    wrong = {key: count for key, count in result.confusion.items() if key[0] != key[1]}
    for (right, verdict), count in sorted(wrong.items()):
        lines.append(f"class   {right}: called {verdict} in {plural(count, 'trial')}")
    ran = [row for row in result.rows if not row.skipped]
    passed = sum(row.is_passed for row in ran)
    lines.append(f"{passed} of {plural(len(ran), 'trial')} passed")
    skipped = len(result.rows) - len(ran)
    if skipped:
        lines[-1] += f", {plural(skipped, 'trial')} skipped"
    return lines
