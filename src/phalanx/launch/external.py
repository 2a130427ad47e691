"""Ranks that somebody else started: torchrun, srun, mpirun, a Kubernetes operator."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

from phalanx.core.launchers import adopt_launched_rank
from phalanx.launch.rank_env import RankEnv, read_rank_env


@dataclass(frozen=True)
class ExternalRanks:
    """The rank this process is, and what a person is told of where that was read."""

    mine: RankEnv
    words: str


def external_ranks(environ: MutableMapping[str, str]) -> ExternalRanks | None:
    """The rank this process is, if a launcher started it: see `core.launchers` for whose variables
    come first.

    What another launcher than torchrun says is written into `environ` in torch's words, for
    whatever reads them next. None means: nobody started ranks, so phalanx does. Raises
    EnvironmentProblem (exit 6) for a description that is incomplete or impossible, rather than
    starting a second set of ranks inside a rank.
    """
    launched = adopt_launched_rank(environ)
    mine = read_rank_env(environ)
    if mine is None:
        return None
    if launched is not None:
        return ExternalRanks(mine, f"from {launched.origin}: {launched.words}")
    address = (
        f"; rank 0 at {environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        if mine.world_size > 1
        else ""
    )
    return ExternalRanks(mine, f"from RANK and WORLD_SIZE: {mine.world_size:,} in all{address}")
