"""Verbs that start their own ranks, where a launcher has called them once for each rank."""

from __future__ import annotations

import typer

from phalanx.core.errors import ExitCode
from phalanx.run.launched import LaunchedRanksError, refuse_launched_ranks


def refuse_launcher(verb: str) -> None:
    """Raise UsageError in rank 0 of another launcher's ranks; end the others without a word, with the same code."""
    try:
        refuse_launched_ranks(verb)
    except LaunchedRanksError as error:
        if error.rank != 0:
            raise typer.Exit(int(ExitCode.USAGE)) from None
        raise
