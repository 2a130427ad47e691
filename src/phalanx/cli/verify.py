"""Prove that a layout computes what one process computes: loss, every gradient, every weight."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.cli._options import JobArguments
from phalanx.cli._verify_options import (
    DeviceOption,
    LayoutsOption,
    MaxSeqLenOption,
    ModelOption,
    RanksOption,
    ResumeOption,
    RowsAsJsonOption,
    RunOption,
    ShrinkOption,
    StepsOption,
    TypesOption,
    VerifyOptions,
)
from phalanx.verify.row import MAX_SEQ_LEN, NUM_STEPS

if TYPE_CHECKING:
    from pathlib import Path

    from phalanx.cli._verify_table import VerifyRowPrinter
    from phalanx.job.schema import Job
    from phalanx.run.suspected_job import ReducedRunJob
    from phalanx.verify.result import VerifyResult
    from phalanx.verify.row import Row

EXAMPLE = "Example: phalanx verify job.toml --layouts=all --ranks=4"


def command(
    arguments: JobArguments = None,
    model: ModelOption = None,
    run: RunOption = None,
    layouts: LayoutsOption = "asked",
    ranks: RanksOption = None,
    shrink: ShrinkOption = None,
    steps: StepsOption = NUM_STEPS,
    types: TypesOption = "",
    max_seq_len: MaxSeqLenOption = None,
    device: DeviceOption = "cpu",
    resume: ResumeOption = True,
    as_json: RowsAsJsonOption = False,
) -> int:
    """Prove that a layout computes what one process computes: loss, every gradient, every weight.

    The reference is the untouched module in a plain loop. Exit code 11 if a layout differs, 3 if
    the one asked for is refused.
    """
    options = VerifyOptions(
        model=model,
        run=run,
        layouts=layouts,
        ranks=ranks,
        shrink=shrink,
        steps=steps,
        types=types,
        max_seq_len=max_seq_len,
        device=device,
        resume=resume,
        as_json=as_json,
    )
    return print_verification(arguments or [], options)


def print_verification(arguments: Sequence[str], options: VerifyOptions) -> int:
    """Load the job of these arguments, verify it and print its rows. Returns the exit code."""
    from phalanx.cli._launched import refuse_launcher
    from phalanx.launch.server_process import start_server_ahead

    refuse_launcher("verify")
    start_server_ahead("phalanx.verify.rank")
    from phalanx.cli._json import print_errors_as_json
    from phalanx.cli._progress import ProgressLine
    from phalanx.cli._verify_table import (
        VERIFY_PROGRESS_INTERVAL_S,
        VerifyRowPrinter,
        show_row_progress,
    )
    from phalanx.verify.drive import verify_job

    printer = VerifyRowPrinter(as_json=options.as_json)
    with (
        print_errors_as_json(options.as_json),
        ProgressLine("judging", line_s=VERIFY_PROGRESS_INTERVAL_S) as line,
    ):
        job, options = _load_judged_job(arguments, options, printer)

        def print_row(row: Row) -> None:
            line.hide()
            printer.print_row(row)

        result = verify_job(
            job,
            options.layouts,
            ranks=options.ranks,
            steps=options.steps,
            types=options.types,
            max_seq_len=options.max_seq_len or MAX_SEQ_LEN,
            device=options.device,
            shrink=options.shrink,
            on_selection=printer.print_selection,
            on_row=print_row,
            on_progress=lambda progress: show_row_progress(line, progress),
            resume=options.resume,
        )
        line.hide()
        printer.print_omissions()
    _print_verdict(result, arguments, options)
    return result.exit_code


def _load_judged_job(
    arguments: Sequence[str], options: VerifyOptions, printer: VerifyRowPrinter
) -> tuple[Job, VerifyOptions]:
    """The job of `arguments`, or of the run that --job names, and the options that hold for it;
    `printer` says what of a run is judged otherwise."""
    if options.run is None:
        from phalanx.cli._arguments import build_overrides_of_model, split_job_file_and_overrides
        from phalanx.job.load import load_job

        job_file, overrides = split_job_file_and_overrides(arguments)
        return load_job(job_file, build_overrides_of_model(options.model, overrides)), options
    suspected = _load_job_of_suspected_run(options.run, arguments, options)
    printer.print_changes(suspected.changes)
    shrink = options.shrink
    # As little as the machine allows, whatever layouts are asked for.
    if shrink is None:
        shrink = suspected.needs_small_widths
    return suspected.job, replace(
        options,
        ranks=options.ranks or suspected.num_ranks,
        shrink=shrink,
        max_seq_len=options.max_seq_len or suspected.max_seq_len,
    )


def _load_job_of_suspected_run(
    run_dir: Path, arguments: Sequence[str], options: VerifyOptions
) -> ReducedRunJob:
    """The job of a run with the overrides of `arguments`."""
    from phalanx.cli._arguments import split_job_file_and_overrides
    from phalanx.core.errors import UsageError
    from phalanx.run.suspected_job import load_reduced_job_of_run
    from phalanx.verify.choose import describe_verify_cluster

    if options.model is not None:
        raise UsageError("--model and --job name two models", fix="give one of them")
    _, overrides = split_job_file_and_overrides(arguments, allow_file=False)
    cluster = describe_verify_cluster(options.device)
    return load_reduced_job_of_run(run_dir, overrides, cluster=cluster)


def _print_verdict(result: VerifyResult, arguments: Sequence[str], options: VerifyOptions) -> None:
    """Print what came out; of rows as JSON nothing, but that the comparison was stopped."""
    from phalanx.cli._verify_table import describe_stopped_comparison
    from phalanx.run.next_command import format_next_command

    if result.stop_code is not None:
        print(describe_stopped_comparison(result), file=sys.stderr)
    elif not options.as_json:
        print(f"verdict {result.summary}")
        if options.judges_own_job and all(row.ok for row in result.rows):
            print(format_next_command("train", *arguments))
