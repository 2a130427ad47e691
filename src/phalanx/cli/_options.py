"""Arguments and options that several verbs have."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli._complete import complete_job_argument, complete_run_directory

JobArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB.toml] [KEY=VALUE]...",
        help="A job file and overrides; none: the default job.",
        autocompletion=complete_job_argument,
    ),
]
"""`[JOB.toml] [KEY=VALUE]...`, as the verbs that take a job have it."""

RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run directory, finished or not.",
        autocompletion=complete_run_directory,
    ),
]
"""The run of the verbs that read what it left."""

TrainedModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN|CHECKPOINT",
        help=(
            "A run (its newest checkpoint), one checkpoint, the URL of either, or a Hugging Face"
            " directory."
        ),
        autocompletion=complete_run_directory,
    ),
]
"""The model of the verbs that run a checkpoint."""

BestOption = Annotated[
    bool, typer.Option("--best", help="What eval.keep_best kept, not the newest.")
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")]
