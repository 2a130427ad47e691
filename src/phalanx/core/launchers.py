"""Ranks that a launcher started: what torchrun, Slurm, Open MPI and PMI say in the environment, in
torch's words.

The order is `LAUNCHER_READERS`: torch's own RANK first, for whoever sets it means it; then
torchrun's arguments as variables (PET_), Slurm, Open MPI, PMI. Each set is read whole or refused by
the name of the variable that is missing or does not fit.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping, MutableMapping

from phalanx.core.errors import EnvironmentProblem
from phalanx.core.launch_variables import (
    FIRST_PORT,
    NUM_PORTS,
    LauncherRank,
    find_first_set_variable,
    get_stripped_variable,
    read_integer_variable,
    read_integer_variable_pair,
    read_port_variable,
    require_integer_variable,
    require_rank_within_size,
)
from phalanx.core.slurm import (
    SLURM_WORLD_SIZE_VARIABLES,
    read_rank_from_slurm,
    read_slurm_node_names,
)

TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
# A variable: our own supervisor, nobody else, started this rank.
SUPERVISED_VARIABLE = "PHALANX_SUPERVISED"
# Of variables that describe ranks.
LAUNCHER_VARIABLE_PREFIXES = ("PET_", "SLURM_", "OMPI_COMM_WORLD_", "PMI_", "MPI_LOCAL")
# torchrun's, where nothing tells one job of a machine from another.
DEFAULT_MASTER_PORT = 29_500


def write_torch_variables_of_launcher(environ: MutableMapping[str, str]) -> LauncherRank | None:
    """Write torch's variables into `environ` if another launcher's describe a rank there, and
    return that rank.

    None where torch's are set, or where no launcher started more than one rank. Raises
    EnvironmentProblem (exit 6).
    """
    launched = find_rank_of_other_launcher(environ)
    if launched is not None:
        environ.update(launched.build_torch_variables())
        # gloo listens, by default, on the address that the host's name resolves to.
        if launched.master_addr == "127.0.0.1":
            environ.setdefault("GLOO_SOCKET_IFNAME", find_loopback_interface_name())
    return launched


def find_rank_of_other_launcher(environ: Mapping[str, str]) -> LauncherRank | None:
    """The rank that variables other than torch's describe: the first of `LAUNCHER_READERS` that has
    more than one rank."""
    if get_stripped_variable(environ, "RANK") or get_stripped_variable(environ, "WORLD_SIZE"):
        return None
    for read in LAUNCHER_READERS:
        rank = read(environ)
        if rank is not None and rank.world_size > 1:
            return rank
    return None


def find_loopback_interface_name() -> str:
    """The name of the interface that holds 127.0.0.1: "lo" on Linux, "lo0" on macOS."""
    names = [name for _, name in socket.if_nameindex()]
    for name in ("lo", "lo0", *names):
        if name in names:
            return name
    return "lo"


def _read_rank_from_torchrun_variables(environ: Mapping[str, str]) -> LauncherRank | None:
    """The rank of a node that PET_ variables, which are torchrun's arguments, give one rank;
    more need torchrun."""
    nodes = get_stripped_variable(environ, "PET_NNODES")
    if nodes in ("", "1", "1:1"):
        return None
    per_node = get_stripped_variable(environ, "PET_NPROC_PER_NODE") or "1"
    start = "start it as `torchrun -m phalanx train ...`, which reads PET_*, or unset PET_NNODES"
    low, _, high = nodes.partition(":")
    if high not in ("", low) or not low.isdigit():
        raise EnvironmentProblem(
            f"PET_NNODES is {nodes!r}, and no torchrun started this process", fix=start
        )
    if per_node != "1":
        raise EnvironmentProblem(
            f"PET_NPROC_PER_NODE is {per_node!r}, and no torchrun started this process", fix=start
        )
    size, rank = (
        int(low),
        require_integer_variable(environ, "PET_NODE_RANK", f"PET_NNODES is {nodes}"),
    )
    require_rank_within_size("PET_NODE_RANK", rank, "PET_NNODES", size)
    host, _, port_text = get_stripped_variable(environ, "PET_RDZV_ENDPOINT").rpartition(":")
    if not port_text.isdigit():
        host, port_text = get_stripped_variable(environ, "PET_RDZV_ENDPOINT"), ""
    address = (
        get_stripped_variable(environ, "PET_MASTER_ADDR")
        or get_stripped_variable(environ, "MASTER_ADDR")
        or host
    )
    if not address:
        raise EnvironmentProblem(
            f"PET_NNODES is {nodes} and PET_MASTER_ADDR is not set",
            fix="set it to the host of node rank 0",
        )
    port = read_port_variable(environ, "PET_MASTER_PORT") or read_port_variable(
        environ, "MASTER_PORT"
    )
    port = port or int(port_text or DEFAULT_MASTER_PORT)
    words = f"{size} nodes with one rank each; rank 0 at {address}:{port}"
    return LauncherRank("torchrun's PET_ variables", rank, size, 0, 1, address, port, words)


def _read_rank_from_open_mpi(environ: Mapping[str, str]) -> LauncherRank | None:
    """A rank of Open MPI's mpirun."""
    pair = _read_rank_and_size(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if pair is None:
        return None
    rank, size = pair
    local_rank = require_integer_variable(
        environ, "OMPI_COMM_WORLD_LOCAL_RANK", f"OMPI_COMM_WORLD_SIZE is {size}"
    )
    local_size = read_integer_variable(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") or size
    require_rank_within_size(
        "OMPI_COMM_WORLD_LOCAL_RANK", local_rank, "OMPI_COMM_WORLD_LOCAL_SIZE", local_size
    )
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")
    return _build_rank_of_mpi(environ, "Open MPI", (rank, size, local_rank, local_size), names)


def _read_rank_from_mpich(environ: Mapping[str, str]) -> LauncherRank | None:
    """A rank of MPICH's or Intel MPI's mpiexec (Hydra), which says where on its node it is in
    MPI_LOCAL*."""
    pair = _read_rank_and_size(environ, "PMI_RANK", "PMI_SIZE")
    if pair is None:
        return None
    rank, size = pair
    local_rank, local_size = rank, size
    local_pair = read_integer_variable_pair(environ, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if local_pair is not None:
        local_rank, local_size = local_pair
    require_rank_within_size("MPI_LOCALRANKID", local_rank, "MPI_LOCALNRANKS", local_size)
    return _build_rank_of_mpi(
        environ, "PMI", (rank, size, local_rank, local_size), ("PMI_JOBID", "PMI_KVSNAME")
    )


def _build_rank_of_mpi(
    environ: Mapping[str, str],
    origin: str,
    position: tuple[int, int, int, int],
    job_names: tuple[str, ...],
) -> LauncherRank:
    """MPI names no host and no port: one node needs none, several need MASTER_ADDR, or Slurm's
    list of nodes."""
    rank, size, local_rank, local_size = position
    if local_size > size:
        raise EnvironmentProblem(f"{origin} says {local_size} ranks on this node of {size} in all")
    address = get_stripped_variable(environ, "MASTER_ADDR")
    if not address and local_size == size:
        address = "127.0.0.1"
    nodes = read_slurm_node_names(environ)
    if not address and nodes is not None and size > 1:
        address = next(iter(nodes))
    if not address and size > 1:
        raise EnvironmentProblem(
            f"{origin} has {size} ranks on several nodes and MASTER_ADDR is not set",
            fix="set it to the host of rank 0 on every rank (mpirun -x MASTER_ADDR=HOST)",
        )
    job = get_stripped_variable(environ, find_first_set_variable(environ, job_names))
    derived = DEFAULT_MASTER_PORT
    if job:
        # Every rank of the job comes to the same one, and another job of the machine to another.
        derived = FIRST_PORT + int(hashlib.sha256(job.encode()).hexdigest()[:8], 16) % NUM_PORTS
    port = read_port_variable(environ, "MASTER_PORT") or derived
    words = f"{size:,} ranks, {local_size:,} on this node; rank 0 at {address}:{port}"
    return LauncherRank(origin, rank, size, local_rank, local_size, address, port, words)


def _read_rank_and_size(
    environ: Mapping[str, str], rank_name: str, size_name: str
) -> tuple[int, int] | None:
    pair = read_integer_variable_pair(environ, rank_name, size_name)
    if pair is None:
        return None
    rank, size = pair
    require_rank_within_size(rank_name, rank, size_name, size)
    # One process of mpirun is no launch of ranks: phalanx starts its own.
    if size == 1:
        return None
    return rank, size


def _read_rank_from_mpirun_in_slurm(environ: Mapping[str, str]) -> LauncherRank | None:
    """mpirun inside a Slurm job starts its daemons by srun: what they pass on describes the
    daemons, not the ranks."""
    if not get_stripped_variable(environ, "OMPI_COMM_WORLD_RANK"):
        return None
    size = read_integer_variable(environ, "OMPI_COMM_WORLD_SIZE")
    if size is None or not find_first_set_variable(environ, SLURM_WORLD_SIZE_VARIABLES):
        return None
    if size == read_integer_variable(environ, "SLURM_NTASKS"):
        return None
    return _read_rank_from_open_mpi(environ)


LAUNCHER_READERS = (
    _read_rank_from_torchrun_variables,
    _read_rank_from_mpirun_in_slurm,
    read_rank_from_slurm,
    _read_rank_from_open_mpi,
    _read_rank_from_mpich,
)
