"""Train a model: plan if needed, start the ranks, train, survive, report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from phalanx.cli._complete import complete_run_directory
from phalanx.cli._options import JobArguments

EXAMPLE = "Example: phalanx train job.toml train.steps=200 parallel.dp_shard=2 run.dir=runs/first"
FALLBACK_KEY = "checkpoint.fallback="


def command(
    arguments: JobArguments = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Continue the run in this directory.",
            autocompletion=complete_run_directory,
        ),
    ] = None,
    fallback: Annotated[
        bool,
        typer.Option(
            "--fallback",
            help="With --resume: if the newest checkpoint is damaged, take one that verifies.",
        ),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say where each value comes from; trains nothing.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="End with the run's facts as one line of JSON; progress goes to stderr."
        ),
    ] = False,
) -> int:
    """Train a model: plan if needed, start the ranks, train, survive, report.

    Without a job file a small decoder learns the source text of this interpreter's standard
    library.

    \b
    phalanx init job.toml                     a job file to begin with
    phalanx train job.toml optim.lr=1e-3      one key changed, for this run
    phalanx train job.toml --explain          what each value is, and where it comes from
    phalanx train --resume runs/first         go on with a run, or finish one that was stopped
    phalanx train job.toml --json > run.json  the facts for a program; words go to stderr
    """
    from phalanx.cli._arguments import split_job_file_and_overrides
    from phalanx.cli._json import print_errors_as_json, print_json, redirect_text_to_stderr
    from phalanx.launch.server_process import start_server_ahead

    with print_errors_as_json(as_json):
        job_file, overrides = split_job_file_and_overrides(
            arguments or [], allow_file=resume is None
        )
        if fallback:
            _check_fallback(overrides, is_resumed=resume is not None)
            overrides = [*overrides, f"{FALLBACK_KEY}true"]
        if explain:
            from phalanx.cli._explain import print_explained_job
            from phalanx.run.resume import load_job_for_explain

            job, source = load_job_for_explain(job_file, overrides, resume)
            print_explained_job(job, source, overrides, as_json=as_json)
            return 0
        start_server_ahead("phalanx.run.rank")
        # Before what takes long to import: a run in use is refused at once.
        from phalanx.run.run_in_use import refuse_run_in_use

        refuse_run_in_use(job_file, overrides, resume)
        from phalanx.job.load import load_job
        from phalanx.run.output import RunOutput
        from phalanx.run.resume import load_resumed_job
        from phalanx.run.stop_signals import raising_on_stop_signals
        from phalanx.run.training import TrainRequest, train_in_ranks_or_as_rank

        with raising_on_stop_signals(), redirect_text_to_stderr(as_json):
            if resume is not None:
                request = TrainRequest.for_resumed_run(load_resumed_job(resume, overrides))
            else:
                request = TrainRequest.for_new_run(load_job(job_file, overrides))
            end = train_in_ranks_or_as_rank(request, RunOutput(), guards_rank=True)
        # Under another launcher each of its ranks comes here: one of them prints.
        if as_json and end.rank == 0:
            from phalanx.report.reduce import collect_run_facts
            from phalanx.report.summary import build_run_json

            print_json("run", build_run_json(collect_run_facts(end.run_dir)))
        return end.exit_code


def _check_fallback(overrides: Sequence[str], *, is_resumed: bool) -> None:
    """Raise UsageError where --fallback has nothing to fall back from, or a key forbids it."""
    from phalanx.cli._arguments import refuse_options_without_effect
    from phalanx.core.errors import UsageError

    refuse_options_without_effect("without --resume", {"--fallback": not is_resumed})
    typed = [word.partition("=")[2].strip() for word in overrides if word.startswith(FALLBACK_KEY)]
    if typed and typed[-1] != "true":
        raise UsageError(
            f"--fallback says true and checkpoint.fallback says {typed[-1]}",
            fix="leave one of them out",
        )
