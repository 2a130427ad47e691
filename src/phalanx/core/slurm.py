"""Ranks that Slurm's srun started: its variables are read, and `scontrol` is not asked."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.core.errors import EnvironmentProblem
from phalanx.core.launch_variables import (
    FIRST_PORT,
    NUM_PORTS,
    LauncherRank,
    find_first_set_variable,
    get_stripped_variable,
    read_integer_variable,
    read_port_variable,
    require_integer_variable,
    require_rank_within_size,
)
from phalanx.core.nodelists import NodeList, parse_slurm_node_list, parse_slurm_tasks_per_node
from phalanx.core.units import plural

# Above it are numbers of Slurm's own steps: batch script, salloc's shell, extern.
MAX_RANK_STEP_ID = 0xFFFF0000
REQUEUE_COUNT_VARIABLE = "SLURM_RESTART_COUNT"


def read_rank_from_slurm(environ: Mapping[str, str]) -> LauncherRank | None:
    """The task that srun started.

    None in a batch script or a shell of salloc, which are no task of srun's.
    """
    if not _is_started_by_srun(environ):
        return None
    size_name = find_first_set_variable(environ, SLURM_WORLD_SIZE_VARIABLES)
    if not size_name:
        raise EnvironmentProblem(
            "SLURM_PROCID is set and SLURM_NTASKS is not",
            fix="start ranks by srun, or unset SLURM_PROCID",
        )
    size = require_integer_variable(environ, size_name, "")
    if size == 1:
        return None
    several = f"{size_name} is {size}"
    rank = require_integer_variable(environ, "SLURM_PROCID", several)
    require_rank_within_size("SLURM_PROCID", rank, size_name, size)
    local_rank = require_integer_variable(environ, "SLURM_LOCALID", several)
    nodes = read_slurm_node_names(environ)
    local_size = _read_tasks_on_this_node(environ, size, nodes)
    require_rank_within_size(
        "SLURM_LOCALID", local_rank, "the number of tasks on this node", local_size
    )
    address = get_stripped_variable(environ, "MASTER_ADDR") or _choose_master_address(
        environ, nodes, rank, several
    )
    step = _read_slurm_step_id(environ)
    job = read_integer_variable(environ, "SLURM_JOB_ID")
    if job is None:
        job = read_integer_variable(environ, "SLURM_JOBID")
    port = read_port_variable(environ, "MASTER_PORT")
    if port is None and job is None:
        raise EnvironmentProblem(
            f"{several} and SLURM_JOB_ID is not set",
            fix="set MASTER_PORT to the same free port on every task",
        )
    # Steps of one job may train at the same time: far apart, for jobs in a row have numbers in a
    # row.
    port = port or FIRST_PORT + ((job or 0) + 1009 * step) % NUM_PORTS
    words = f"{_describe_slurm_tasks(size, job, nodes)}; rank 0 at {address}:{port}"
    attempt = count_slurm_requeues(environ)
    return LauncherRank("Slurm", rank, size, local_rank, local_size, address, port, words, attempt)


def count_slurm_requeues(environ: Mapping[str, str]) -> int:
    """How often Slurm has started this job again, whatever it starts in it; 0 outside of Slurm."""
    return read_integer_variable(environ, REQUEUE_COUNT_VARIABLE) or 0


def _read_slurm_step_id(environ: Mapping[str, str]) -> int:
    """The number of srun's step, 0 where none is set; releases of Slurm spell it in two ways."""
    return (
        read_integer_variable(environ, "SLURM_STEP_ID")
        or read_integer_variable(environ, "SLURM_STEPID")
        or 0
    )


def _describe_slurm_tasks(size: int, job: int | None, nodes: NodeList | None) -> str:
    words = f"{size:,} tasks"
    if job is not None:
        words += f" of job {job}"
    if nodes is not None:
        words += f" on {plural(len(nodes), 'node')}"
    return words


SLURM_WORLD_SIZE_VARIABLES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_STEP_ONLY_VARIABLES = (
    "SLURM_STEP_ID",
    "SLURM_STEPID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_SRUN_COMM_HOST",
)
_BATCH_SCRIPT_VARIABLES = ("SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST")


def _is_started_by_srun(environ: Mapping[str, str]) -> bool:
    """A batch script has SLURM_PROCID=0 and SLURM_NTASKS, too; srun alone sets variables of its
    step."""
    if _read_slurm_step_id(environ) > MAX_RANK_STEP_ID:
        return False
    rank = read_integer_variable(environ, "SLURM_PROCID")
    if rank is None:
        _require_rank_in_step(environ)
        return False
    if rank != 0 or find_first_set_variable(environ, _STEP_ONLY_VARIABLES):
        return True
    return environ.get("ENVIRONMENT") != "BATCH" and not find_first_set_variable(
        environ, _BATCH_SCRIPT_VARIABLES
    )


def _require_rank_in_step(environ: Mapping[str, str]) -> None:
    """Raise EnvironmentProblem where variables speak of a step of several tasks, and none of this
    one's rank."""
    present = find_first_set_variable(environ, (*_STEP_ONLY_VARIABLES, "SLURM_LOCALID"))
    if not present:
        return
    is_alone = all(
        read_integer_variable(environ, name) in (None, 1) for name in SLURM_WORLD_SIZE_VARIABLES
    )
    if not is_alone:
        raise EnvironmentProblem(
            f"{present} is set and SLURM_PROCID is not",
            fix=f"start ranks by srun, or unset {present}",
        )


def read_slurm_node_names(environ: Mapping[str, str]) -> NodeList | None:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if text := get_stripped_variable(environ, name):
            try:
                return parse_slurm_node_list(text)
            except ValueError as error:
                raise EnvironmentProblem(
                    f"{name} is {text[:80]!r}, which is no list of nodes", why=str(error)
                ) from None
    return None


def _read_tasks_on_this_node(environ: Mapping[str, str], size: int, nodes: NodeList | None) -> int:
    """The number of tasks on this node.

    The allocation's numbers are not the step's where their sum is another one.
    """
    node = read_integer_variable(environ, "SLURM_NODEID") or 0
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if not (text := get_stripped_variable(environ, name)):
            continue
        try:
            counts = parse_slurm_tasks_per_node(text)
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


def _choose_master_address(
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
    if rank == 0 and read_integer_variable(environ, "SLURM_NODEID"):
        raise EnvironmentProblem(
            f"SLURM_PROCID is 0 on node {get_stripped_variable(environ, 'SLURM_NODEID')} of"
            " SLURM_JOB_NODELIST",
            fix="set MASTER_ADDR to the host of task 0",
        )
    return next(iter(nodes))
