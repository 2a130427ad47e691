"""What a verb that starts its own ranks says where a launcher has called it once for each rank."""

from __future__ import annotations

import os

from phalanx.core.errors import UsageError
from phalanx.launch.external import read_external_launch


class StartedByLauncherError(UsageError):
    """A launcher called a verb that starts its own ranks.

    Only `rank` 0 says so: the words are the same on all.
    """

    rank: int = 0


def refuse_external_launcher(verb: str) -> None:
    """Raise LaunchedRanksError in each rank of another launcher."""
    launched = read_external_launch(os.environ)
    if launched is None or launched.rank_env.world_size == 1:
        return
    error = StartedByLauncherError(
        f"{verb} starts its own ranks, and a launcher has called it {launched.rank_env.world_size}"
        " times",
        why=launched.words,
        fix=f"call phalanx {verb} once, without the launcher",
    )
    error.rank = launched.rank_env.rank
    raise error
