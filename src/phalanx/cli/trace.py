"""Record what every rank does in a few steps, as a file for Perfetto."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli._complete import complete_run_directory

if TYPE_CHECKING:
    from phalanx.run.collect_trace import WantedTrace

EXAMPLE = "Example: phalanx trace runs/train-20260101-120000 --steps=100:103"


def command(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run directory, of a run that goes on or has ended.",
            autocompletion=complete_run_directory,
        ),
    ],
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps", metavar="A:B", help="Steps to trace, both ends included; at most 100."
        ),
    ] = None,
    next_steps: Annotated[
        int | None,
        typer.Option(
            "--next",
            metavar="N",
            help="Trace the next N steps of a run that goes on; 3 without --steps and --next.",
        ),
    ] = None,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels", help="With all operators and kernels (torch.profiler); at most 10 steps."
        ),
    ] = False,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", metavar="FILE", help="Where to write it; else RUN/traces/steps-A-B.pftrace."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait for the steps.")
    ] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
) -> int:
    """Record what every rank does in a few steps, and write it as one file for Perfetto.

    Of a run that goes on the steps are asked for, and waited for. Of one that has ended they are
    there if the job (observe.trace_steps) or this command has asked for them in time.
    """
    from phalanx.cli._json import print_errors_as_json, print_json
    from phalanx.cli._output_files import require_trace_or_new_file
    from phalanx.cli._trace_progress import TraceProgressLine
    from phalanx.run.collect_trace import find_or_request_parts, write_trace_file
    from phalanx.run.next_command import format_program_command

    with print_errors_as_json(as_json):
        request = _read_options(steps, next_steps, kernels=kernels, timeout_s=timeout)
        run_dir = _require_run_directory(run)
        if out is not None:
            require_trace_or_new_file(Path(out))
        line = TraceProgressLine()
        try:
            with line:
                traced, parts = find_or_request_parts(run_dir, request, line.tell)
        except KeyboardInterrupt:
            if line.is_accepted:
                # The request is taken: nothing takes it back from all ranks alike.
                command = f"{format_program_command()} trace {shlex.quote(run)}"
                print(f"the ranks go on tracing; later: {command} --steps A:B", file=sys.stderr)
            raise
        path = run_dir / "traces" / f"steps-{traced.first}-{traced.last}.pftrace"
        if out is not None:
            path = Path(out)
        with line:
            num_bytes, facts = write_trace_file(path, parts, traced, line.tell_merged)
        if as_json:
            document = {"file": str(path), "num_bytes": num_bytes, **facts.to_json()}
            print_json("trace", document, indent=1)
            return 0
        from phalanx.report.trace.words import list_trace_lines

        lines = list_trace_lines(path, num_bytes, facts, wants_operators=kernels)
        print(*lines, sep="\n")
    return 0


def _require_run_directory(run: str) -> Path:
    """The directory of a run. Raises UsageError if none is there."""
    from phalanx.core.errors import UsageError

    run_dir = Path(run)
    if not (run_dir / "events").is_dir():
        raise UsageError(
            "no run is there", where=run, fix="give a directory that phalanx train wrote"
        )
    return run_dir


def _read_options(
    steps: str | None, num_next: int | None, *, kernels: bool, timeout_s: float
) -> WantedTrace:
    """The options, checked. Raises UsageError."""
    from phalanx.core.errors import UsageError
    from phalanx.core.step_ranges import MAX_PROFILED_STEPS, MAX_TRACED_STEPS, parse_step_range
    from phalanx.run.collect_trace import WantedTrace

    if steps is not None and num_next is not None:
        raise UsageError("--steps and --next say different steps", fix="give one of them")
    steps_range = None
    num_steps = num_next
    if steps is not None:
        try:
            steps_range = parse_step_range(steps)
        except ValueError as error:
            fix = "write a step or a range, both ends included: 100 or 100:103"
            raise UsageError(str(error), where="--steps", fix=fix) from None
        num_steps = steps_range.num_steps
    if num_next is not None and num_next < 1:
        raise UsageError(f"{num_next} steps are none", where="--next", fix="give at least 1")
    most = MAX_PROFILED_STEPS if kernels else MAX_TRACED_STEPS
    if num_steps is not None and num_steps > most:
        scope = "with --kernels" if kernels else "in a trace"
        raise UsageError(f"{num_steps:,} steps are more than the {most} that fit {scope}")
    # NaN compares as False.
    if not timeout_s > 0:
        raise UsageError(f"{timeout_s} is no time to wait", where="--timeout")
    return WantedTrace(steps_range, num_next, kernels, timeout_s)
