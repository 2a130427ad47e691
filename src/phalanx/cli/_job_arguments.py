"""What the verbs that take a job have as their arguments."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli._complete import complete_job

JobArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB.toml] [KEY=VALUE]...",
        help="A job file and overrides; none: the default job.",
        autocompletion=complete_job,
    ),
]
"""`[JOB.toml] [KEY=VALUE]...`, as the verbs that take a job have it."""
