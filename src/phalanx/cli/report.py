"""Write RUN/report.html: the run as one self-contained page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli._complete import complete_run

EXAMPLE = "Example: phalanx report runs/train-20260101-120000"


def command(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run directory, finished or not.", autocompletion=complete_run
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the run's facts as JSON; writes no page.")
    ] = False,
) -> int:
    """Write RUN/report.html: the run as one self-contained page."""
    from phalanx.cli._json import print_errors_as_json, print_json
    from phalanx.core.errors import UsageError

    with print_errors_as_json(as_json):
        run_dir = Path(run)
        if not (run_dir / "events").is_dir():
            raise UsageError(
                "no run is there", where=run, fix="give a directory that phalanx train wrote"
            )
        if as_json:
            from phalanx.report.reduce import collect_run_facts
            from phalanx.report.summary import build_run_json

            print_json("run", build_run_json(collect_run_facts(run_dir)), indent=1)
            return 0
        from phalanx.report.bottleneck.describe import list_verdict_lines
        from phalanx.report.page import write_report
        from phalanx.report.reduce import collect_run_facts

        facts = collect_run_facts(run_dir)
        if facts.bottleneck is not None:
            print(*list_verdict_lines(facts.bottleneck), sep="\n")
        print(write_report(run_dir, facts))
    return 0
