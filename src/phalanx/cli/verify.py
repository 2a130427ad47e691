"""Prove that a layout computes what one process computes: loss, every gradient, every weight."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli._options import JobArguments
from phalanx.verify.row import MAX_SEQ_LEN, NUM_STEPS

if TYPE_CHECKING:
    from phalanx.run.suspected_job import ReducedRunJob
    from phalanx.verify.row import Row

EXAMPLE = "Example: phalanx verify job.toml --layouts=all --ranks=4"


def command(
    arguments: JobArguments = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME", help="A preset, or package.module:factory, instead."
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--job",
            metavar="RUN",
            help="The job of this run, at the layout that it had.",
        ),
    ] = None,
    layouts: Annotated[
        str,
        typer.Option(
            "--layouts",
            metavar="asked|all|NAMES",
            help="The job's own, a list that covers each axis and pairs of them, or some.",
        ),
    ] = "asked",
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, metavar="N", help="How many ranks.")
    ] = None,
    shrink: Annotated[
        bool | None,
        typer.Option(
            "--shrink/--no-shrink",
            help="Built-in models at two blocks and small widths; default with --layouts all.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, max=100, metavar="K", help="Optimizer steps.")
    ] = NUM_STEPS,
    types: Annotated[
        str,
        typer.Option(
            "--types",
            metavar="NAMES",
            help="Of float64, float32, bf16, fp16, fp8; else the first two and the job's own.",
        ),
    ] = "",
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            "--max-seq-len",
            min=1,
            metavar="N",
            help="Tokens of longer sequences that are judged; 64, of a run as many as this machine"
            " holds, and computes in about ten minutes.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="cpu|cuda",
            help="Where layouts compute: cuda needs a GPU for each rank.",
        ),
    ] = "cpu",
    resume: Annotated[
        bool,
        typer.Option(help="Take over the rows that the same command had before it was stopped."),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per row.")] = False,
) -> int:
    """Prove that a layout computes what one process computes: loss, every gradient, every weight.

    The reference is the untouched module in a plain loop. Exit code 11 if a layout differs, 3 if
    the one asked for is refused.
    """
    return print_verification(
        arguments or [],
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


def print_verification(
    arguments: Sequence[str],
    *,
    model: str | None = None,
    run: Path | None = None,
    layouts: str = "asked",
    ranks: int | None = None,
    shrink: bool | None = None,
    steps: int = NUM_STEPS,
    types: str = "",
    max_seq_len: int | None = None,
    device: str = "cpu",
    resume: bool = False,
    as_json: bool = False,
) -> int:
    """Load the job of these arguments, verify it and print its rows. Returns the exit code."""
    from phalanx.cli._launched import refuse_launcher
    from phalanx.launch.server_process import start_server_ahead

    refuse_launcher("verify")
    start_server_ahead("phalanx.verify.rank")
    from phalanx.cli._arguments import build_overrides_of_model, split_job_file_and_overrides
    from phalanx.cli._json import print_errors_as_json
    from phalanx.cli._progress import ProgressLine
    from phalanx.cli._verify_table import (
        VERIFY_PROGRESS_INTERVAL_S,
        VerifyRowPrinter,
        describe_stopped_comparison,
        show_row_progress,
    )
    from phalanx.job.load import load_job
    from phalanx.run.next_command import format_next_command
    from phalanx.verify.drive import verify_job

    printer = VerifyRowPrinter(as_json=as_json)
    with (
        print_errors_as_json(as_json),
        ProgressLine("judging", line_s=VERIFY_PROGRESS_INTERVAL_S) as line,
    ):
        if run is not None:
            suspected = _load_job_of_suspected_run(run, arguments, model, device, as_json=as_json)
            job, ranks = suspected.job, ranks or suspected.num_ranks
            # As little as the machine allows, whatever layouts are asked for.
            if shrink is None:
                shrink = suspected.needs_small_widths
            max_seq_len = max_seq_len or suspected.max_seq_len
        else:
            job_file, overrides = split_job_file_and_overrides(arguments)
            job = load_job(job_file, build_overrides_of_model(model, overrides))

        def print_row(row: Row) -> None:
            line.hide()
            printer.print_row(row)

        result = verify_job(
            job,
            layouts,
            ranks=ranks,
            steps=steps,
            types=types,
            max_seq_len=max_seq_len or MAX_SEQ_LEN,
            device=device,
            shrink=shrink,
            on_selection=printer.print_selection,
            on_row=print_row,
            on_progress=lambda progress: show_row_progress(line, progress),
            resume=resume,
        )
        line.hide()
        printer.print_omissions()
    if result.stop_code is not None:
        print(describe_stopped_comparison(result), file=sys.stderr)
    if result.stop_code is None and not as_json:
        print(f"verdict {result.summary}")
        is_own_job = layouts == "asked" and model is None and run is None
        if is_own_job and all(row.ok for row in result.rows):
            print(format_next_command("train", *arguments))
    return result.exit_code


def _load_job_of_suspected_run(
    run_dir: Path, arguments: Sequence[str], model: str | None, device: str, *, as_json: bool
) -> ReducedRunJob:
    """The job of a run with the overrides of `arguments`; says what is judged otherwise."""
    from phalanx.cli._arguments import split_job_file_and_overrides
    from phalanx.core.errors import UsageError
    from phalanx.run.suspected_job import load_reduced_job_of_run
    from phalanx.verify.choose import describe_verify_cluster

    if model is not None:
        raise UsageError("--model and --job name two models", fix="give one of them")
    _, overrides = split_job_file_and_overrides(arguments, allow_file=False)
    cluster = describe_verify_cluster(device)
    suspected = load_reduced_job_of_run(run_dir, overrides, cluster=cluster)
    if not as_json:
        for change in suspected.changes:
            print(f"changed {change}")
    return suspected
