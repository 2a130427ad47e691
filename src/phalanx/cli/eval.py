"""Evaluate a checkpoint: held-out loss and perplexity, on the run's own data or another source."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli._complete import complete_job_argument
from phalanx.cli._options import BestOption, JsonOption, TrainedModelArgument

EXAMPLE = "Example: phalanx eval runs/train-20260101-120000 data.source=other.txt"


def command(
    checkpoint: TrainedModelArgument,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB.toml] [KEY=VALUE]...",
            help=(
                "Keys of data, eval, parallel, precision; a job file where no run says which model"
                " it is."
            ),
            autocompletion=complete_job_argument,
        ),
    ] = None,
    best: BestOption = False,
    as_json: JsonOption = False,
) -> int:
    """Evaluate a checkpoint: held-out loss and perplexity, on the run's own data or another source.

    The run's own data gives what the run recorded at that step. Another source is evaluated whole,
    or at most eval.tokens of it; its text goes through the run's tokenizer.

    \b
    phalanx eval runs/first                             the newest checkpoint, on what was held out
    phalanx eval runs/first/checkpoints/step-400        that one
    phalanx eval runs/first --best data.source=new.txt  the best one, on all of a file
    phalanx eval runs/first parallel.ranks=1            on one process
    """
    import time

    from phalanx.cli._arguments import split_job_file_and_overrides
    from phalanx.cli._eval_output import (
        print_evaluation_result,
        print_evaluation_task,
        show_evaluation_progress,
    )
    from phalanx.cli._json import print_json
    from phalanx.cli._launched import print_ended_ranks, refuse_launcher
    from phalanx.cli._output import make_errors_printable
    from phalanx.cli._progress import ProgressLine
    from phalanx.launch.server_process import start_server_ahead
    from phalanx.run.scratch import open_scratch_directory
    from phalanx.run.trained.evaluate import EVALUATION_KEYS, evaluate, prepare_evaluation
    from phalanx.run.trained.launch import RanksEndedEarlyError
    from phalanx.run.trained.model import open_trained_model

    start_s = time.monotonic()
    try:
        with make_errors_printable(as_json), open_scratch_directory("eval") as scratch:
            refuse_launcher("eval")
            start_server_ahead("phalanx.run.trained.rank")
            job_file, overrides = split_job_file_and_overrides(arguments or [])
            model = open_trained_model(
                checkpoint,
                job_file,
                overrides,
                best=best,
                allowed_keys=EVALUATION_KEYS,
                on_one_rank=False,
            )
            task = prepare_evaluation(model, scratch)
            if not as_json:
                print_evaluation_task(task)
            with ProgressLine("evaluating") as line:
                result = evaluate(
                    task,
                    scratch,
                    on_progress=lambda progress: show_evaluation_progress(line, progress),
                )
    except RanksEndedEarlyError as error:
        return print_ended_ranks(error, as_json=as_json)
    if as_json:
        print_json("eval", {**result.to_json(), "wall_s": time.monotonic() - start_s}, indent=1)
    else:
        print_evaluation_result(result)
    return 0
