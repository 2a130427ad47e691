"""Runs `phalanx drill --soak`, shows how far it is, and prints a line for each fault and the bars
of the run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli._arguments import split_job_file_and_overrides
from phalanx.cli._drill import describe_answer, split_faults_from_job
from phalanx.cli._json import print_errors_as_json, print_json
from phalanx.cli._launched import refuse_launcher
from phalanx.cli._output_files import require_writable_output
from phalanx.cli._progress import ProgressLine
from phalanx.cli._stops import telling_stops
from phalanx.core.errors import ExitCode, UsageError
from phalanx.core.units import format_seconds, plural

if TYPE_CHECKING:
    from phalanx.drills.soak.drive import SoakPlan, SoakProgress, SoakResult
    from phalanx.drills.soak.measure import AnsweredStrike
    from phalanx.drills.soak.mix import FaultMix

# Of half an hour a line now and then is enough.
_PROGRESS_LINE_S = 15.0


@dataclass(frozen=True)
class SoakOptions:
    """The options of `phalanx drill --soak`, as given. `refused`: those of trials, which a soak has
    no use for."""

    minutes: float
    fault_every_s: float
    seed: int
    out: Path | None
    run_limit_s: float | None
    refused: tuple[str, ...] = ()


def print_soak(arguments: Sequence[str], options: SoakOptions, *, as_json: bool) -> int:
    """Run a soak and print what it made of its faults. Returns the exit code: 11 if a bar is
    missed."""
    from phalanx.drills.soak.drive import SoakRequest, run_soak
    from phalanx.drills.soak.kept import SOAK_RESULT_FILE_NAME
    from phalanx.drills.soak.mix import choose_mix

    refuse_launcher("drill")
    with (
        print_errors_as_json(as_json),
        telling_stops(describe_stopped_soak(options.out)),
        ProgressLine("soaking", line_s=_PROGRESS_LINE_S) as line,
    ):
        if options.refused:
            raise UsageError(
                f"a soak is one run: it cannot have {' and '.join(options.refused)} of trials",
                fix="leave one of them out",
            )
        if options.out is not None:
            require_writable_output(
                options.out / SOAK_RESULT_FILE_NAME, "writing the result", option="--out"
            )
        words, rest = split_faults_from_job(arguments)
        job_file, overrides = split_job_file_and_overrides(rest)
        mix = choose_mix(words, options.fault_every_s)
        request = SoakRequest(
            job_file,
            tuple(overrides),
            mix,
            options.minutes,
            options.fault_every_s,
            options.seed,
            options.out,
            options.run_limit_s,
        )

        def show_plan(plan: SoakPlan) -> None:
            if not as_json:
                line.hide()
                for text in describe_soak_plan(plan, mix):
                    print(text, flush=True)

        result = run_soak(
            request,
            on_progress=lambda progress: show_soak_progress(line, progress),
            on_plan=show_plan,
        )
    # What half an hour has shown, before a disk can refuse it.
    if as_json:
        print_json("drill-soak", result.to_json(), indent=1)
    else:
        for text in describe_soak(result):
            print(text)
    if options.out is not None:
        _write_result(options.out, result)
        if not as_json:
            print(f"result  {options.out / SOAK_RESULT_FILE_NAME}")
            print(f"page    {result.run_dir / 'report.html'}")
    return int(ExitCode.OK if result.is_passed else ExitCode.VERIFICATION)


def describe_stopped_soak(out: Path | None) -> str:
    """What is left of a soak that was stopped, and how it goes on."""
    if out is not None:
        return (
            "the run that went on is ended; the same command goes on from the undisturbed run, if"
            " that had ended"
        )
    return (
        "the run that went on is ended, and nothing is left of it; the same command begins again"
        " (with --out DIR it goes on from the undisturbed run)"
    )


def show_soak_progress(line: ProgressLine, progress: SoakProgress) -> None:
    """Show how far a soak is: the run, its faults so far, and the time that is left."""
    words = progress.activity
    if progress.num_struck:
        words += f"  {plural(progress.num_struck, 'fault')} so far"
    if progress.left_s is not None:
        words += f"  eta {format_seconds(progress.left_s)}"
    line.update(progress.num_done, progress.num_steps, instead=words)


def describe_soak_plan(plan: SoakPlan, mix: FaultMix) -> list[str]:
    """What a soak is about to do."""
    shape = plan.shape
    lines = [
        f"plan    {plural(shape.num_steps, 'step')} of {format_seconds(plan.step_s)} on"
        f" {plural(shape.num_ranks, 'rank')}, a save each {shape.save_every_steps},"
        f" {plural(len(plan.strikes), 'fault')}, one in each {plan.gap_steps}",
        f"keys    {' '.join(plan.keys)}",
        f"mix     {', '.join(mix.faults)}",
    ]
    faults_of_reason: dict[str, list[str]] = {}
    for each in mix.left_out:
        faults_of_reason.setdefault(each.why, []).append(each.fault)
    lines += [f"not     {', '.join(names)}: {why}" for why, names in faults_of_reason.items()]
    return lines


def describe_soak(result: SoakResult) -> list[str]:
    """All faults, what they have in common, and the bars of the run."""
    lines = []
    for number, answered in enumerate(result.answered, 1):
        lines += describe_strike(number, answered)
    lines += ["", *describe_mix(result), ""]
    undisturbed_s, disturbed_s = result.undisturbed.end.wall_s, result.disturbed.end.wall_s
    goodput = result.goodput
    if goodput.undisturbed is not None:
        lines.append(
            f"walls   undisturbed {format_seconds(undisturbed_s)}, goodput"
            f" {goodput.undisturbed:.1%}; disturbed {format_seconds(disturbed_s)}; the bars of all"
            f" faults are {format_seconds(goodput.charged_s)}"
        )
    for check in result.checks:
        word = "passed" if check.ok else "missed"
        lines.append(f"{word:<7} {check.name:<20} {check.found}, bar {check.bar}")
    return lines


def describe_strike(number: int, answered: AnsweredStrike) -> list[str]:
    """A fault of a soak in one line, and one more for each bar that it missed."""
    planned, measured = answered.planned, answered.measured
    position = f"rank {planned.place.rank}, step {planned.place.step}, {planned.place.phase}"
    at = "never"
    if answered.struck_s is not None:
        at = format_seconds(answered.struck_s)
    word = "passed" if answered.is_passed else "missed"
    parts = [position, *describe_answer(measured)]
    lines = [f"{word:<7} {number:>3}  {at:>9}  {planned.fault:<16} {'; '.join(parts)}"]
    lines += [
        f"{'':<24} {check.name}: {check.found}, bar {check.bar}"
        for check in answered.checks
        if not check.ok
    ]
    return lines


def describe_mix(result: SoakResult) -> list[str]:
    """A line for each fault of the mix: how often it struck, and how soon the run trained again."""
    lines = ["fault             times  passed  training again, median (most)"]
    for name, count in sorted(result.counts.items()):
        of_fault = [each for each in result.answered if each.planned.fault == name]
        passed = sum(each.is_passed for each in of_fault)
        recovery_times_s = [each.measured.trained_again_s for each in of_fault]
        known = [seconds for seconds in recovery_times_s if seconds is not None]
        words = "never"
        if known:
            median_s, most_s = statistics.median(known), max(known)
            words = f"{format_seconds(median_s)} ({format_seconds(most_s)})"
        lines.append(f"{name:<16} {count:>6} {passed:>7}  {words}")
    return lines


def _write_result(out: Path, result: SoakResult) -> None:
    from phalanx.core.disk_errors import build_path_resource_error
    from phalanx.core.files import write_json_atomically
    from phalanx.drills.soak.kept import SOAK_RESULT_FILE_NAME

    path = out / SOAK_RESULT_FILE_NAME
    try:
        write_json_atomically(path, {"schema": "phalanx.drill-soak/1", **result.to_json()})
    except OSError as error:
        raise build_path_resource_error(error, "writing the result", path, place="--out") from None
