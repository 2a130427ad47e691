"""Prove that a layout computes what one process computes: loss, every gradient, every weight."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli._job_arguments import JobArguments

EXAMPLE = "Example: phalanx verify job.toml --layouts=all --ranks=4"


def command(
    arguments: JobArguments = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="A preset, or package.module:factory, instead.")
    ] = None,
    layouts: Annotated[
        str,
        typer.Option("--layouts", metavar="asked|all|NAMES", help="The job's own, every one of these ranks, or some."),
    ] = "asked",
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, metavar="N", help="How many ranks.")] = None,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Judge a built-in model at two blocks and small widths.")
    ] = False,
    steps: Annotated[int, typer.Option("--steps", min=1, max=100, metavar="K", help="Optimizer steps.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per row.")] = False,
) -> int:
    """Prove that a layout computes what one process computes: loss, every gradient, every weight.

    The reference is the untouched module in a plain loop. Exit code 11 if a layout differs, 3 if the one asked for is
    refused.
    """
    from phalanx.cli._verify import Request, verify

    return verify(Request(tuple(arguments or ()), model, layouts, ranks, shrink, steps, as_json))
