"""The identity of a rank in environment variables: written for supervised ranks, read under any
launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.cores import count_allowed_cores
from phalanx.core.errors import EnvironmentProblem
from phalanx.core.launch_variables import (
    read_integer_variable,
    read_port_variable,
    require_rank_within_size,
)
from phalanx.core.launchers import SUPERVISED_VARIABLE, find_loopback_interface_name

# Set if the server runs with one thread without the user's wish: that is not for the ranks.
SERVER_CHOSE_THREADS_VARIABLE = "PHALANX_SERVER_CHOSE_THREADS"
# The newest name comes first.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class RankEnv:
    """A rank's number and those of its node. `attempt` counts the starts of a run, from 0."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    attempt: int = 0


def build_rank_env_variables(
    ranks: RankEnv, master_port: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """The variables that a supervised rank has in its environment, on top of `environ`.

    `TORCHELASTIC_USE_AGENT_STORE` makes rank 0 a client of the store like every other rank: the
    supervisor's side holds it, so the death of rank 0 is no different. The interface is pinned
    because gloo listens, by default, on the address the host's name resolves to.
    """
    loopback = find_loopback_interface_name()
    variables = {
        "RANK": str(ranks.rank),
        "WORLD_SIZE": str(ranks.world_size),
        "LOCAL_RANK": str(ranks.local_rank),
        "LOCAL_WORLD_SIZE": str(ranks.local_world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": loopback,
        "PHALANX_ATTEMPT": str(ranks.attempt),
        SUPERVISED_VARIABLE: "1",
    }
    if "NCCL_SOCKET_IFNAME" not in environ:
        variables["NCCL_SOCKET_IFNAME"] = loopback
    # The ranks of a node share its cores; torch would take all of them in each.
    if "OMP_NUM_THREADS" not in environ or SERVER_CHOSE_THREADS_VARIABLE in environ:
        variables["OMP_NUM_THREADS"] = str(max(1, count_allowed_cores() // ranks.local_world_size))
    return variables | build_expandable_segments_variables(environ)


def build_expandable_segments_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The allocator's variable for segments of GPU memory that grow; none if the user has set one.

    Tensors of another size in each step, as experts have, else leave holes that nothing fits into.
    torch reads it once.
    """
    if any(name in environ for name in ALLOCATOR_VARIABLES):
        return {}
    return {ALLOCATOR_VARIABLES[0]: "expandable_segments:True"}


def build_flight_recorder_variables(trace: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with which NCCL's flight recorder writes its last collectives to `trace`, to
    whose name torch appends the rank, at a timeout; without those that `environ` has.

    Releases of torch differ in what they do by themselves.
    """
    variables = {
        # Older releases know the second name alone.
        "TORCH_FR_DUMP_TEMP_FILE": str(trace),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(trace),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    # The earlier name of the same number.
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environ:
        variables["TORCH_FR_BUFFER_SIZE"] = "2000"
    return {name: value for name, value in variables.items() if name not in environ}


def read_rank_env(environ: Mapping[str, str]) -> RankEnv | None:
    """The rank that `environ` describes, or None where it describes none.

    Without LOCAL_RANK a rank is alone on its node (as under Kubernetes' PyTorchJob); without
    LOCAL_WORLD_SIZE all ranks share one node. Raises EnvironmentProblem (exit 6) for half a
    description or an impossible one.
    """
    rank, world_size = (
        read_integer_variable(environ, "RANK"),
        read_integer_variable(environ, "WORLD_SIZE"),
    )
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        present, absent = "RANK", "WORLD_SIZE"
        if rank is None:
            present, absent = absent, present
        raise EnvironmentProblem(
            f"{present} is set and {absent} is not",
            fix=f"unset {present}, or let the launcher set both",
        )
    require_rank_within_size("RANK", rank, "WORLD_SIZE", world_size)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if world_size > 1 and missing:
        verb = "is" if len(missing) == 1 else "are"
        raise EnvironmentProblem(
            f"WORLD_SIZE is {world_size} and {' and '.join(missing)} {verb} not set",
            fix="set the address and port of rank 0 on every rank, or unset RANK and WORLD_SIZE",
        )
    read_port_variable(environ, "MASTER_PORT")
    local_rank, local_world_size = _read_local_rank_and_size(environ, world_size)
    attempt = read_integer_variable(environ, "PHALANX_ATTEMPT")
    if attempt is None:
        attempt = read_integer_variable(environ, "TORCHELASTIC_RESTART_COUNT")
    return RankEnv(rank, world_size, local_rank, local_world_size, attempt or 0)


def _read_local_rank_and_size(environ: Mapping[str, str], world_size: int) -> tuple[int, int]:
    """(local rank, ranks on this node). Raises EnvironmentProblem for impossible ones."""
    local_rank = read_integer_variable(environ, "LOCAL_RANK")
    local_world_size = read_integer_variable(environ, "LOCAL_WORLD_SIZE")
    if local_world_size is None and local_rank is None:
        local_world_size = 1
    elif local_world_size is None:
        local_world_size = world_size
    elif local_rank is None and local_world_size > 1:
        raise EnvironmentProblem(
            f"LOCAL_WORLD_SIZE is {local_world_size} and LOCAL_RANK is not set", fix="set it"
        )
    require_rank_within_size("LOCAL_RANK", local_rank or 0, "LOCAL_WORLD_SIZE", local_world_size)
    return local_rank or 0, local_world_size
