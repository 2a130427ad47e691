"""Ranks that somebody else started: torchrun, srun, mpirun, a Kubernetes operator."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.launch.rank_env import RankEnv, read_rank_env


def external_ranks(environ: Mapping[str, str]) -> RankEnv | None:
    """The rank this process is, if a launcher set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    None means: nobody started ranks, so phalanx does. Raises EnvironmentProblem (exit 6) for a description that
    is incomplete or impossible, rather than starting a second set of ranks inside a rank.
    """
    return read_rank_env(environ)
