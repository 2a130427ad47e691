"""Choose a layout for a job on this machine and say why, with memory per rank."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLE = "Example: phalanx plan job.toml model.num_layers=24 cluster.memory_gib=8"


def command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[JOB.toml] [KEY=VALUE]...", help="A job file and overrides; none: the default job."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> int:
    """Choose a layout for a job on this machine and say why, with memory per rank.

    The vocabulary is the job's, or that of bytes; `phalanx train` counts it from the data.
    """
    import json

    from phalanx.cli._arguments import split_arguments
    from phalanx.job.load import load_job
    from phalanx.plan.planner import describe, make_plan

    job_file, overrides = split_arguments(arguments or [])
    job = load_job(job_file, overrides)
    plan = make_plan(job)
    print(json.dumps(plan.to_json(), indent=1) if as_json else "\n".join(describe(plan)))
    return 0
