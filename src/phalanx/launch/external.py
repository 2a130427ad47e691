"""Ranks of another launcher: torchrun, srun, mpirun, a Kubernetes operator."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

from phalanx.core.launchers import write_torch_variables_of_launcher
from phalanx.launch.rank_env import RankEnv, read_rank_env


@dataclass(frozen=True)
class ExternalLaunch:
    """The rank this process is; `words` tell a person from which variables that was read, and
    `launcher` names what started it."""

    rank_env: RankEnv
    words: str
    launcher: str = "another launcher"


def read_external_launch(environ: MutableMapping[str, str]) -> ExternalLaunch | None:
    """The rank this process is, if a launcher started it: see `core.launchers` for the order of
    their variables.

    Variables of another launcher than torchrun are written into `environ` in torch's words, for
    whatever reads them next. None: no launcher started ranks, so phalanx does. Raises
    EnvironmentProblem (exit 6) for a description that is incomplete or impossible, rather than
    starting a second set of ranks inside a rank.
    """
    launched = write_torch_variables_of_launcher(environ)
    rank_env = read_rank_env(environ)
    if rank_env is None:
        return None
    if launched is not None:
        words = f"from {launched.origin}: {launched.words}"
        return ExternalLaunch(rank_env, words, launched.origin)
    words = f"from RANK and WORLD_SIZE: {rank_env.world_size:,} in all"
    if rank_env.world_size > 1:
        words += f"; rank 0 at {environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    # torchrun sets it, and nothing else does.
    if environ.get("TORCHELASTIC_RUN_ID"):
        return ExternalLaunch(rank_env, words, "torchrun")
    return ExternalLaunch(rank_env, words)
