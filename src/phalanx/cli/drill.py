"""Put faults into a job, and say what it makes of them: detected, named, recovered, beside bars."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli._options import JsonOption

EXAMPLE = "Example: phalanx drill kill freeze"
DEFAULT_FAULT_EVERY_S = 30.0


DrillArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB.toml] [FAULT]... [KEY=VALUE]...",
        help="A job file (none: the default job, made small), faults or all, and overrides.",
    ),
]
SeedOption = Annotated[
    int, typer.Option("--seed", min=0, metavar="N", help="Ranks, steps and phases of faults.")
]
RepeatOption = Annotated[
    int, typer.Option("--repeat", min=1, metavar="K", help="Trials of each fault.")
]
StepsOption = Annotated[
    int, typer.Option("--steps", min=12, metavar="N", help="Steps of each run.")
]
CampaignOption = Annotated[
    Path | None,
    typer.Option(
        "--campaign", metavar="FILE", help="Keep trials there; those it has are not run again."
    ),
]
AgainOption = Annotated[
    bool,
    typer.Option("--again", help="Run trials again whose fault or recovery had other source code."),
]
ShareOption = Annotated[
    int,
    typer.Option(
        "--share",
        min=1,
        metavar="N",
        help="So many trials may have one run, where their faults fit beside each other.",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Keep the runs there, and write a page."),
]
LimitOption = Annotated[
    float | None,
    typer.Option("--limit", min=1, metavar="S", help="Seconds after which a run is given up."),
]
SoakOption = Annotated[
    float | None,
    typer.Option(
        "--soak",
        min=0.1,
        metavar="MINUTES",
        help="One run of so many minutes and many faults, beside an undisturbed one.",
    ),
]
FaultEveryOption = Annotated[
    float,
    typer.Option("--fault-every", min=1, metavar="S", help="Seconds between two faults of a soak."),
]
ListOption = Annotated[
    bool, typer.Option("--list", help="The faults, and where they can run here.")
]


def command(
    arguments: DrillArguments = None,
    seed: SeedOption = 0,
    repeat: RepeatOption = 1,
    steps: StepsOption = 40,
    campaign: CampaignOption = None,
    again: AgainOption = False,
    share: ShareOption = 1,
    out: OutOption = None,
    limit: LimitOption = None,
    soak: SoakOption = None,
    fault_every: FaultEveryOption = DEFAULT_FAULT_EVERY_S,
    shows_list: ListOption = False,
    as_json: JsonOption = False,
) -> int:
    """Put faults into a job, and say what it makes of them: detected, named, recovered, by bars.

    The job runs once undisturbed, and once for each fault (with --share N: for N of them; with
    --soak: once with all faults).
    Exit code 11 if a bar is missed.
    """
    from phalanx.cli._arguments import refuse_options_without_effect
    from phalanx.cli._drill import DrillOptions, print_drill, print_faults
    from phalanx.cli._json import print_errors_as_json

    of_trials = {
        "--repeat": repeat != 1,
        "--steps": steps != 40,
        "--campaign": campaign is not None,
        "--again": again,
        "--share": share != 1,
    }
    with print_errors_as_json(as_json):
        if shows_list:
            of_runs = {
                "--seed": seed != 0,
                "--out": out is not None,
                "--limit": limit is not None,
                "--soak": soak is not None,
            }
            given = {"a fault, job file or key": bool(arguments), **of_trials, **of_runs}
            refuse_options_without_effect("with --list", given)
        if soak is None:
            is_given = fault_every != DEFAULT_FAULT_EVERY_S
            refuse_options_without_effect("without --soak", {"--fault-every": is_given})
    if shows_list:
        return print_faults(as_json=as_json)
    if soak is not None:
        from phalanx.cli._soak import SoakOptions, print_soak

        refused = tuple(name for name, is_given in of_trials.items() if is_given)
        soak_options = SoakOptions(soak, fault_every, seed, out, limit, refused)
        return print_soak(arguments or (), soak_options, as_json=as_json)
    options = DrillOptions(seed, repeat, steps, campaign, out, limit, again, share)
    return print_drill(arguments or (), options, as_json=as_json)
