"""Evaluate a checkpoint: held-out loss and perplexity, on the run's own data or another source."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli._complete import complete_job, complete_run

EXAMPLE = "Example: phalanx eval runs/train-20260101-120000 data.source=other.txt"


def command(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT",
            help="A run (its newest checkpoint), one checkpoint, the URL of either, or a Hugging Face directory.",
            autocompletion=complete_run,
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB.toml] [KEY=VALUE]...",
            help="Keys of data, eval, parallel, precision; a job file where no run says which model it is.",
            autocompletion=complete_job,
        ),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="What eval.keep_best kept, not the newest.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
) -> int:
    """Evaluate a checkpoint: held-out loss and perplexity, on the run's own data or another source.

    The run's own data gives what the run recorded at that step. Another source is evaluated whole, or at most
    eval.tokens of it; its text goes through the run's tokenizer.

    \b
    phalanx eval runs/first                             the newest checkpoint, on what was held out
    phalanx eval runs/first/checkpoints/step-400        that one
    phalanx eval runs/first --best data.source=new.txt  the best one, on all of a file
    phalanx eval runs/first parallel.ranks=1            on one process
    """
    from phalanx.cli._eval import evaluate

    return evaluate(checkpoint, arguments or [], best=best, as_json=as_json)
