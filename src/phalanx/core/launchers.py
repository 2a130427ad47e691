"""Ranks that a launcher started: what torchrun, Slurm, Open MPI and PMI say in the environment, in
torch's words.

The order is `ORDER`: torch's own RANK first, for whoever sets it means it; then torchrun's
arguments as variables (PET_), Slurm, Open MPI, PMI. Each set is read whole or refused by the name
of the variable that is missing or does not fit.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass

from phalanx.core.errors import EnvironmentProblem
from phalanx.core.nodelists import NodeList, parse_nodelist, parse_tasks_per_node
from phalanx.core.units import plural

TORCH_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
SUPERVISED = "PHALANX_SUPERVISED"  # variable: our own supervisor, nobody else, started this rank
PREFIXES = ("PET_", "SLURM_", "OMPI_COMM_WORLD_", "PMI_", "MPI_LOCAL")  # of what describes ranks
# Below the ports that a kernel gives away by itself (32768 on Linux).
FIRST_PORT, NUM_PORTS = 12_000, 20_000
# torchrun's, where nothing tells one job of a machine from another.
USUAL_PORT = 29_500
# Above it are numbers of Slurm's own steps: batch script, salloc's shell, extern.
LARGEST_RANK_STEP = 0xFFFF0000


@dataclass(frozen=True)
class LaunchedRank:
    """One rank of a launcher's.

    `origin` is its name, `words` what a person is told of all its ranks.
    """

    origin: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    words: str
    attempt: int = 0

    def torch_variables(self) -> dict[str, str]:
        """The same rank in the variables that torch reads."""
        variables = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }
        if self.attempt:
            variables["PHALANX_ATTEMPT"] = str(self.attempt)
        return variables


def adopt_launched_rank(environ: MutableMapping[str, str]) -> LaunchedRank | None:
    """Write torch's variables into `environ` if another launcher's describe a rank there, and
    return that rank.

    None where torch's are set, or where no launcher started more than one rank. Raises
    EnvironmentProblem (exit 6).
    """
    launched = find_launched_rank(environ)
    if launched is not None:
        environ.update(launched.torch_variables())
        # gloo listens, by default, on the address that the host's name resolves to.
        if launched.master_addr == "127.0.0.1":
            environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    return launched


def find_launched_rank(environ: Mapping[str, str]) -> LaunchedRank | None:
    """The rank that variables other than torch's describe: the first of `ORDER` that has more
    than one rank."""
    if _text(environ, "RANK") or _text(environ, "WORLD_SIZE"):
        return None
    for read in ORDER:
        rank = read(environ)
        if rank is not None and rank.world_size > 1:
            return rank
    return None


def loopback_interface() -> str:
    """The name of the interface that holds 127.0.0.1: "lo" on Linux, "lo0" on macOS."""
    names = [name for _, name in socket.if_nameindex()]
    for name in ("lo", "lo0", *names):
        if name in names:
            return name
    return "lo"


def read_integer(environ: Mapping[str, str], name: str) -> int | None:
    """The integer in variable `name`, None where it is unset or empty.

    Raises EnvironmentProblem for another text.
    """
    text = _text(environ, name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise EnvironmentProblem(f"{name} is {text[:80]!r}, which is not an integer") from None


def check_range(name: str, value: int, size_name: str, size: int) -> None:
    """Raise EnvironmentProblem unless `value` is one of the `size` numbers from 0."""
    if not 0 <= value < size:
        raise EnvironmentProblem(
            f"{name} is {value} and {size_name} is {size}", fix=f"{name} counts from 0"
        )


def read_port(environ: Mapping[str, str], name: str) -> int | None:
    """The port in variable `name`. Raises EnvironmentProblem for a number that is none."""
    port = read_integer(environ, name)
    if port is not None and not 0 < port < 65_536:
        raise EnvironmentProblem(
            f"{name} is {port}, which is not a port", fix="ports are 1 to 65535"
        )
    return port


def _read_torchrun_arguments(environ: Mapping[str, str]) -> LaunchedRank | None:
    """The rank of a node that PET_ variables, which are torchrun's arguments, give one rank;
    more need torchrun."""
    nodes = _text(environ, "PET_NNODES")
    if nodes in ("", "1", "1:1"):
        return None
    per_node = _text(environ, "PET_NPROC_PER_NODE") or "1"
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
    size, rank = int(low), _require(environ, "PET_NODE_RANK", f"PET_NNODES is {nodes}")
    check_range("PET_NODE_RANK", rank, "PET_NNODES", size)
    host, _, port_text = _text(environ, "PET_RDZV_ENDPOINT").rpartition(":")
    if not port_text.isdigit():
        host, port_text = _text(environ, "PET_RDZV_ENDPOINT"), ""
    address = _text(environ, "PET_MASTER_ADDR") or _text(environ, "MASTER_ADDR") or host
    if not address:
        raise EnvironmentProblem(
            f"PET_NNODES is {nodes} and PET_MASTER_ADDR is not set",
            fix="set it to the host of node rank 0",
        )
    port = read_port(environ, "PET_MASTER_PORT") or read_port(environ, "MASTER_PORT")
    port = port or int(port_text or USUAL_PORT)
    words = f"{size} nodes with one rank each; rank 0 at {address}:{port}"
    return LaunchedRank("torchrun's PET_ variables", rank, size, 0, 1, address, port, words)


def _read_slurm(environ: Mapping[str, str]) -> LaunchedRank | None:
    """The task that srun started.

    None in a batch script or a shell of salloc, which are no task of srun's.
    """
    if not _is_task_of_srun(environ):
        return None
    size_name = _first_set(environ, _SLURM_SIZES)
    if not size_name:
        raise EnvironmentProblem(
            "SLURM_PROCID is set and SLURM_NTASKS is not",
            fix="start ranks by srun, or unset SLURM_PROCID",
        )
    size = _require(environ, size_name, "")
    if size == 1:
        return None
    several = f"{size_name} is {size}"
    rank = _require(environ, "SLURM_PROCID", several)
    check_range("SLURM_PROCID", rank, size_name, size)
    local_rank = _require(environ, "SLURM_LOCALID", several)
    nodes = _slurm_nodes(environ)
    local_size = _slurm_local_size(environ, size, nodes)
    check_range("SLURM_LOCALID", local_rank, "the number of tasks on this node", local_size)
    address = _text(environ, "MASTER_ADDR") or _slurm_address(environ, nodes, rank, several)
    step = _slurm_step(environ)
    job = read_integer(environ, "SLURM_JOB_ID")
    if job is None:
        job = read_integer(environ, "SLURM_JOBID")
    port = read_port(environ, "MASTER_PORT")
    if port is None and job is None:
        raise EnvironmentProblem(
            f"{several} and SLURM_JOB_ID is not set",
            fix="set MASTER_PORT to the same free port on every task",
        )
    # Steps of one job may train at the same time: far apart, for jobs in a row have numbers in a
    # row.
    port = port or FIRST_PORT + ((job or 0) + 1009 * step) % NUM_PORTS
    words = f"{_describe_slurm_tasks(size, job, nodes)}; rank 0 at {address}:{port}"
    attempt = read_integer(environ, "SLURM_RESTART_COUNT") or 0
    return LaunchedRank("Slurm", rank, size, local_rank, local_size, address, port, words, attempt)


def _slurm_step(environ: Mapping[str, str]) -> int:
    """The number of srun's step, 0 where none is set; releases of Slurm spell it in two ways."""
    return read_integer(environ, "SLURM_STEP_ID") or read_integer(environ, "SLURM_STEPID") or 0


def _describe_slurm_tasks(size: int, job: int | None, nodes: NodeList | None) -> str:
    words = f"{size:,} tasks"
    if job is not None:
        words += f" of job {job}"
    if nodes is not None:
        words += f" on {plural(len(nodes), 'node')}"
    return words


_SLURM_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_OF_STEPS = (
    "SLURM_STEP_ID",
    "SLURM_STEPID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_SRUN_COMM_HOST",
)
_OF_BATCH_SCRIPTS = ("SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST")


def _is_task_of_srun(environ: Mapping[str, str]) -> bool:
    """A batch script has SLURM_PROCID=0 and SLURM_NTASKS, too; srun alone sets variables of its
    step."""
    if _slurm_step(environ) > LARGEST_RANK_STEP:
        return False
    rank = read_integer(environ, "SLURM_PROCID")
    if rank is None:
        _refuse_step_without_rank(environ)
        return False
    if rank != 0 or _first_set(environ, _OF_STEPS):
        return True
    return environ.get("ENVIRONMENT") != "BATCH" and not _first_set(environ, _OF_BATCH_SCRIPTS)


def _refuse_step_without_rank(environ: Mapping[str, str]) -> None:
    """Raise EnvironmentProblem where variables speak of a step of several tasks, and none of this
    one's rank."""
    present = _first_set(environ, (*_OF_STEPS, "SLURM_LOCALID"))
    if not present:
        return
    is_alone = all(read_integer(environ, name) in (None, 1) for name in _SLURM_SIZES)
    if not is_alone:
        raise EnvironmentProblem(
            f"{present} is set and SLURM_PROCID is not",
            fix=f"start ranks by srun, or unset {present}",
        )


def _slurm_nodes(environ: Mapping[str, str]) -> NodeList | None:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if text := _text(environ, name):
            try:
                return parse_nodelist(text)
            except ValueError as error:
                raise EnvironmentProblem(
                    f"{name} is {text[:80]!r}, which is no list of nodes", why=str(error)
                ) from None
    return None


def _slurm_local_size(environ: Mapping[str, str], size: int, nodes: NodeList | None) -> int:
    """The number of tasks on this node.

    The allocation's numbers are not the step's where their sum is another one.
    """
    node = read_integer(environ, "SLURM_NODEID") or 0
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if not (text := _text(environ, name)):
            continue
        try:
            counts = parse_tasks_per_node(text)
        except ValueError as error:
            raise EnvironmentProblem(f"{name} is {text[:80]!r}", why=str(error)) from None
        if sum(counts) == size and node < len(counts):
            return counts[node]
        if name.startswith("SLURM_STEP_"):
            raise EnvironmentProblem(
                f"{name} is {text[:80]!r} (tasks of {len(counts)} nodes), of {size} tasks in all,"
                f" on node {node}",
                fix="unset it, or let srun set it",
            )
    num_nodes = 1
    if nodes is not None:
        num_nodes = len(nodes)
    return -(-size // min(num_nodes, size))


def _slurm_address(
    environ: Mapping[str, str], nodes: NodeList | None, rank: int, several: str
) -> str:
    """The first node's name; where there is no other node, this machine, which nobody else can
    then reach."""
    if nodes is None:
        raise EnvironmentProblem(
            f"{several} and SLURM_JOB_NODELIST is not set",
            fix="set MASTER_ADDR to the host of task 0",
        )
    if len(nodes) == 1:
        return "127.0.0.1"
    if rank == 0 and read_integer(environ, "SLURM_NODEID"):
        raise EnvironmentProblem(
            f"SLURM_PROCID is 0 on node {_text(environ, 'SLURM_NODEID')} of SLURM_JOB_NODELIST",
            fix="set MASTER_ADDR to the host of task 0",
        )
    return next(iter(nodes))


def _read_open_mpi(environ: Mapping[str, str]) -> LaunchedRank | None:
    """A rank of Open MPI's mpirun."""
    pair = _read_pair(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if pair is None:
        return None
    rank, size = pair
    local_rank = _require(environ, "OMPI_COMM_WORLD_LOCAL_RANK", f"OMPI_COMM_WORLD_SIZE is {size}")
    local_size = read_integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") or size
    check_range("OMPI_COMM_WORLD_LOCAL_RANK", local_rank, "OMPI_COMM_WORLD_LOCAL_SIZE", local_size)
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")
    return _mpi_rank(environ, "Open MPI", (rank, size, local_rank, local_size), names)


def _read_pmi(environ: Mapping[str, str]) -> LaunchedRank | None:
    """A rank of MPICH's or Intel MPI's mpiexec (Hydra), which says where on its node it is in
    MPI_LOCAL*."""
    pair = _read_pair(environ, "PMI_RANK", "PMI_SIZE")
    if pair is None:
        return None
    rank, size = pair
    local_rank, local_size = rank, size
    local_pair = _read_both(environ, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if local_pair is not None:
        local_rank, local_size = local_pair
    check_range("MPI_LOCALRANKID", local_rank, "MPI_LOCALNRANKS", local_size)
    return _mpi_rank(
        environ, "PMI", (rank, size, local_rank, local_size), ("PMI_JOBID", "PMI_KVSNAME")
    )


def _mpi_rank(
    environ: Mapping[str, str],
    origin: str,
    position: tuple[int, int, int, int],
    job_names: tuple[str, ...],
) -> LaunchedRank:
    """MPI names no host and no port: one node needs none, several need MASTER_ADDR, or Slurm's
    list of nodes."""
    rank, size, local_rank, local_size = position
    if local_size > size:
        raise EnvironmentProblem(f"{origin} says {local_size} ranks on this node of {size} in all")
    address = _text(environ, "MASTER_ADDR")
    if not address and local_size == size:
        address = "127.0.0.1"
    nodes = _slurm_nodes(environ)
    if not address and nodes is not None and size > 1:
        address = next(iter(nodes))
    if not address and size > 1:
        raise EnvironmentProblem(
            f"{origin} has {size} ranks on several nodes and MASTER_ADDR is not set",
            fix="set it to the host of rank 0 on every rank (mpirun -x MASTER_ADDR=HOST)",
        )
    job = _text(environ, _first_set(environ, job_names))
    derived = USUAL_PORT
    if job:
        # Every rank of the job comes to the same one, and another job of the machine to another.
        derived = FIRST_PORT + int(hashlib.sha256(job.encode()).hexdigest()[:8], 16) % NUM_PORTS
    port = read_port(environ, "MASTER_PORT") or derived
    words = f"{size:,} ranks, {local_size:,} on this node; rank 0 at {address}:{port}"
    return LaunchedRank(origin, rank, size, local_rank, local_size, address, port, words)


def _read_pair(
    environ: Mapping[str, str], rank_name: str, size_name: str
) -> tuple[int, int] | None:
    pair = _read_both(environ, rank_name, size_name)
    if pair is None:
        return None
    rank, size = pair
    check_range(rank_name, rank, size_name, size)
    if size == 1:
        return None
    return rank, size


def _read_both(environ: Mapping[str, str], first: str, second: str) -> tuple[int, int] | None:
    """The integers of two variables, None if neither is set.

    Raises EnvironmentProblem where one of them is missing.
    """
    values = read_integer(environ, first), read_integer(environ, second)
    present, absent = first, second
    if values[0] is None:
        present, absent = second, first
    if values[0] is not None and values[1] is not None:
        return values[0], values[1]
    if values == (None, None):
        return None
    raise EnvironmentProblem(
        f"{present} is set and {absent} is not", fix=f"set {absent}, or unset {present}"
    )


def _read_mpirun_in_slurm(environ: Mapping[str, str]) -> LaunchedRank | None:
    """mpirun inside a Slurm job starts its daemons by srun: what they pass on describes the
    daemons, not the ranks."""
    if not _text(environ, "OMPI_COMM_WORLD_RANK"):
        return None
    size = read_integer(environ, "OMPI_COMM_WORLD_SIZE")
    if size is None or not _first_set(environ, _SLURM_SIZES):
        return None
    if size == read_integer(environ, "SLURM_NTASKS"):
        return None
    return _read_open_mpi(environ)


def _require(environ: Mapping[str, str], name: str, why: str) -> int:
    value = read_integer(environ, name)
    if value is None:
        raise EnvironmentProblem(
            f"{why} and {name} is not set",
            fix=(
                "let the launcher set it, or set RANK, WORLD_SIZE, "
                "LOCAL_RANK, MASTER_ADDR and MASTER_PORT on every rank"
            ),
        )
    return value


def _first_set(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """The first of the variables `names` that is set to a text, or "" if none is."""
    for name in names:
        if _text(environ, name):
            return name
    return ""


def _text(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name, "").strip()


ORDER = (_read_torchrun_arguments, _read_mpirun_in_slurm, _read_slurm, _read_open_mpi, _read_pmi)
