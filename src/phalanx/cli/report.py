"""Write RUN/report.html: the run as one self-contained page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "Example: phalanx report runs/train-20260101-120000"


def command(run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, finished or not.")]) -> int:
    """Write RUN/report.html: the run as one self-contained page."""
    from phalanx.core.errors import UsageError
    from phalanx.report.page import write_report

    run_dir = Path(run)
    if not (run_dir / "events").is_dir():
        raise UsageError("no run is there", where=run, fix="give a directory that phalanx train wrote")
    print(write_report(run_dir))
    return 0
