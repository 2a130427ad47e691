"""The processes of a supervised run, as one of its ranks finds them.

The supervisor starts a template, which forks a server, which forks the ranks and the process of
their store.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from phalanx.checkpoint.ownership.run_lock import LOCK_FILE_NAME, read_lock_holder
from phalanx.core.errors import EnvironmentProblem
from phalanx.core.launchers import SUPERVISED_VARIABLE


def find_server() -> psutil.Process:
    """The process that forked this rank. Raises EnvironmentProblem where there is none."""
    server = psutil.Process().parent()
    if SUPERVISED_VARIABLE not in os.environ or server is None:
        raise EnvironmentProblem(
            "this fault strikes a process of phalanx's own supervisor, and the ranks have another",
            fix="run the job by phalanx train",
        )
    return server


def find_supervisor(run_dir: Path) -> psutil.Process:
    """The process that holds the run's lock: it started the run."""
    holder = read_lock_holder(run_dir / LOCK_FILE_NAME)
    if SUPERVISED_VARIABLE not in os.environ or holder is None:
        raise EnvironmentProblem("the supervisor of this rank is gone, or it has none")
    return psutil.Process(holder.pid)


def list_run_processes(run_dir: Path) -> list[psutil.Process]:
    """All processes of this run, the supervisor first."""
    supervisor = find_supervisor(run_dir)
    return [supervisor, *supervisor.children(recursive=True)]


def find_store() -> psutil.Process:
    """The process that serves the ranks' rendezvous store."""
    port = int(os.environ["MASTER_PORT"])
    for process in find_server().children():
        for connection in process.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                return process
    raise EnvironmentProblem(f"no process listens on the store's port {port}")
