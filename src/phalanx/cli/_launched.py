"""Verbs that start their own ranks, where a launcher has called them once for each rank."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from phalanx.cli._json import print_json
from phalanx.core.errors import ExitCode
from phalanx.run.launched import StartedByLauncherError, refuse_external_launcher

if TYPE_CHECKING:
    from phalanx.run.trained.launch import RanksEndedEarlyError


def refuse_launcher(verb: str) -> None:
    """Raise UsageError in rank 0 of another launcher's ranks; end the others without a word, with
    the same code.
    """
    try:
        refuse_external_launcher(verb)
    except StartedByLauncherError as error:
        if error.rank != 0:
            raise typer.Exit(int(ExitCode.USAGE)) from None
        raise


def print_ended_ranks(error: RanksEndedEarlyError, *, as_json: bool) -> int:
    """Print why ranks ended before their work was done, with `as_json` as an object, too; returns
    the exit code."""
    if as_json:
        facts = {
            "error": type(error).__name__,
            "exit_code": int(error.exit_code),
            "what": "the ranks ended before their work was done",
            "where": None,
            "why": error.message or None,
            "fix": None,
        }
        print_json("error", facts)
    if error.message:
        print(error.message, file=sys.stderr)
    return error.exit_code
