"""What a verb that starts its own ranks says where a launcher has called it once for each rank."""

from __future__ import annotations

import os

import typer

from phalanx.core.errors import ExitCode, UsageError
from phalanx.launch.external import external_ranks


def refuse_launched_ranks(verb: str) -> None:
    """Raise UsageError in rank 0 of another launcher's ranks; end the others without a word, with the same code."""
    launched = external_ranks(os.environ)
    if launched is None or launched.mine.world_size == 1:
        return
    if launched.mine.rank != 0:
        raise typer.Exit(int(ExitCode.USAGE))
    raise UsageError(
        f"{verb} starts its own ranks, and a launcher has called it {launched.mine.world_size} times",
        why=launched.words,
        fix=f"call phalanx {verb} once, without the launcher",
    )
