"""Train a model: plan if needed, start the ranks, train, survive, report."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLE = "Example: phalanx train job.toml train.steps=200 parallel.dp_shard=2 run.dir=runs/first"


def command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[JOB.toml] [KEY=VALUE]...", help="A job file and overrides; none: the default job."),
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Continue the run in this directory.")
    ] = None,
) -> int:
    """Train a model: plan if needed, start the ranks, train, survive, report.

    Without a job file a small decoder learns the source text of this interpreter's standard library.
    """
    from phalanx.cli._arguments import split_arguments
    from phalanx.cli._run import train

    job_file, overrides = split_arguments(arguments or [], allow_file=resume is None)
    return train(job_file, overrides, resume)
