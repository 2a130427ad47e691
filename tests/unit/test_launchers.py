"""Ranks as launchers describe them: whose variables come first, what is derived, what is refused
and by which name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

import pytest

from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.stores import open_store_of_run
from phalanx.core.errors import EnvironmentProblem, ExitCode, JobError
from phalanx.core.files import write_json_atomically
from phalanx.core.launch_variables import LauncherRank
from phalanx.core.launchers import find_rank_of_other_launcher, write_torch_variables_of_launcher
from phalanx.core.nodelists import parse_slurm_node_list, parse_slurm_tasks_per_node
from phalanx.job.load import load_job
from phalanx.job.schema import Job
from phalanx.launch.external import read_external_launch
from phalanx.run.output import RunOutput
from phalanx.run.resume import load_requeued_run
from phalanx.run.training import TrainRequest, train_in_ranks_or_as_rank

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PET = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "pod-0",
}
TORCH = {
    "RANK": "0",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "here",
    "MASTER_PORT": "29501",
}


def found(environ: dict[str, str]) -> LauncherRank:
    rank = find_rank_of_other_launcher(environ)
    assert rank is not None
    return rank


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[01-03,07],gpu5", ["node01", "node02", "node03", "node07", "gpu5"]),
        ("localhost", ["localhost"]),
        ("a1,a2", ["a1", "a2"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("rack[1-2]n[3,4]", ["rack1n3", "rack1n4", "rack2n3", "rack2n4"]),
        ("n[1-2]-ib.cluster.org", ["n1-ib.cluster.org", "n2-ib.cluster.org"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        (" node[1-2] , login ", ["node1", "node2", "login"]),
    ],
)
def test_a_list_of_nodes(text: str, hosts: list[str]) -> None:
    nodes = parse_slurm_node_list(text)
    assert list(nodes) == hosts
    assert len(nodes) == len(hosts)


def test_a_list_of_a_million_nodes_is_not_expanded() -> None:
    nodes = parse_slurm_node_list("n[0000001-1000000][1-1000]")
    assert len(nodes) == 10**9
    assert next(iter(nodes)) == "n00000011"


@pytest.mark.parametrize(
    "text", ["n[1-3", "n1-3]", "n[[1]]", "n[3-1]", "n[a-b]", "n[]", "", "a,,b", "a b", "n[1-]"]
)
def test_what_is_no_list_of_nodes(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_slurm_node_list(text)


def test_tasks_of_each_node() -> None:
    assert parse_slurm_tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert parse_slurm_tasks_per_node("4") == [4]
    with pytest.raises(ValueError, match=r"'2\(x\)' is not a number of tasks"):
        parse_slurm_tasks_per_node("2(x)")


def test_a_task_of_slurm_on_two_nodes() -> None:
    rank = found(SLURM)
    assert (rank.rank, rank.world_size, rank.local_rank, rank.local_world_size) == (3, 4, 1, 2)
    assert rank.master_addr == "node07"
    assert rank.words == f"4 tasks of job 4711 on 2 nodes; rank 0 at node07:{rank.master_port}"
    assert (
        found(SLURM | {"SLURM_PROCID": "2", "SLURM_LOCALID": "0"}).master_port == rank.master_port
    )
    assert found(SLURM | {"SLURM_JOB_ID": "4712"}).master_port != rank.master_port
    assert (
        found(SLURM | {"SLURM_STEP_ID": "1"}).master_port != rank.master_port
    )  # steps of one job side by side


def test_uneven_nodes_and_those_of_the_step() -> None:
    """The allocation's list and numbers are not the step's where srun took a part of it."""
    uneven = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}
    assert found(uneven).local_world_size == 1
    part = SLURM | {"SLURM_JOB_NODELIST": "node[01-09]", "SLURM_STEP_NODELIST": "node[05,09]"}
    assert found(part).master_addr == "node05"


def test_one_node_needs_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SLURM | {
        "SLURM_JOB_NODELIST": "node07",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "4",
    }
    assert found(one).master_addr == "127.0.0.1"
    assert found(one | {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "99"}).words.endswith(
        "rank 0 at elsewhere:99"
    )


def test_no_variable_of_steps_is_needed() -> None:
    """Those that everybody reads are enough, from either task."""
    few = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost"}
    for number in ("0", "1"):
        rank = found(few | {"SLURM_PROCID": number, "SLURM_LOCALID": number})
        assert (rank.rank, rank.local_rank, rank.local_world_size) == (int(number), int(number), 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"},  # srun -n 1
        {"SLURM_STEP_ID": "4294967290"},  # the shell of salloc
        {"SLURM_STEP_ID": "4294967291"},  # a batch script
        {
            "SLURM_STEP_ID": "",
            "SLURM_STEP_TASKS_PER_NODE": "",
            "SLURM_PROCID": "0",
            "ENVIRONMENT": "BATCH",
        },
        {
            "SLURM_STEP_ID": "",
            "SLURM_STEP_TASKS_PER_NODE": "",
            "SLURM_PROCID": "0",
            "SLURM_SUBMIT_DIR": "/home",
        },
        {"SLURM_STEP_ID": "", "SLURM_PROCID": "", "SLURM_LOCALID": ""},  # an older salloc
    ],
)
def test_what_is_no_task_of_srun_starts_its_own_ranks(changes: dict[str, str]) -> None:
    assert find_rank_of_other_launcher(SLURM | changes) is None
    assert read_external_launch(SLURM | changes) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (SLURM | {"SLURM_NTASKS": ""}, "SLURM_PROCID is set and SLURM_NTASKS is not"),
        (SLURM | {"SLURM_PROCID": ""}, "SLURM_STEP_ID is set and SLURM_PROCID is not"),
        (SLURM | {"SLURM_PROCID": "4"}, "SLURM_PROCID is 4 and SLURM_NTASKS is 4"),
        (SLURM | {"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x', which is not an integer"),
        (SLURM | {"SLURM_LOCALID": ""}, "SLURM_NTASKS is 4 and SLURM_LOCALID is not set"),
        (
            SLURM | {"SLURM_LOCALID": "2"},
            "SLURM_LOCALID is 2 and the number of tasks on this node is 2",
        ),
        (SLURM | {"SLURM_JOB_NODELIST": ""}, "SLURM_NTASKS is 4 and SLURM_JOB_NODELIST is not set"),
        (
            SLURM | {"SLURM_JOB_NODELIST": "n[1"},
            "SLURM_JOB_NODELIST is 'n[1', which is no list of nodes",
        ),
        (SLURM | {"SLURM_JOB_ID": ""}, "SLURM_NTASKS is 4 and SLURM_JOB_ID is not set"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2"}, "SLURM_STEP_TASKS_PER_NODE is '2'"),
        (SLURM | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000, which is not a port"),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": ""},
            "OMPI_COMM_WORLD_RANK is set and OMPI_COMM_WORLD_SIZE is not",
        ),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_RANK": ""},
            "OMPI_COMM_WORLD_SIZE is set and OMPI_COMM_WORLD_RANK is not",
        ),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"},
            "OMPI_COMM_WORLD_RANK is 2 and OMPI_COMM_WORLD_SIZE is 2",
        ),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": ""}, "OMPI_COMM_WORLD_LOCAL_RANK is not set"),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            "MASTER_ADDR is not set",
        ),
        (PMI | {"PMI_SIZE": ""}, "PMI_RANK is set and PMI_SIZE is not"),
        (PMI | {"PMI_RANK": "-1"}, "PMI_RANK is -1 and PMI_SIZE is 2"),
        (PMI | {"MPI_LOCALNRANKS": ""}, "MPI_LOCALRANKID is set and MPI_LOCALNRANKS is not"),
        (PET | {"PET_NODE_RANK": ""}, "PET_NNODES is 2 and PET_NODE_RANK is not set"),
        (
            PET | {"PET_NPROC_PER_NODE": "4"},
            "PET_NPROC_PER_NODE is '4', and no torchrun started this process",
        ),
        (PET | {"PET_NNODES": "1:4"}, "PET_NNODES is '1:4', and no torchrun started this process"),
        (PET | {"PET_MASTER_ADDR": ""}, "PET_NNODES is 2 and PET_MASTER_ADDR is not set"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "0"},
            "MASTER_PORT is 0",
        ),
    ],
)
def test_half_a_description_is_refused_by_the_variable(environ: dict[str, str], words: str) -> None:
    with pytest.raises(EnvironmentProblem, match=re.escape(words)) as caught:
        read_external_launch(dict(environ))
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    assert "\n" not in str(caught.value)


def test_the_order_of_launchers() -> None:
    """torch's own, PET_, Slurm, Open MPI, PMI."""
    sets = [PET, SLURM, OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, PMI]
    for first, origin in enumerate(["torchrun's PET_ variables", "Slurm", "Open MPI", "PMI"]):
        together: dict[str, str] = {}
        for variables in sets[first:]:
            together |= variables
        if origin == "Open MPI":
            together |= {"MASTER_ADDR": "host"}
        assert found(together).origin == origin
        assert find_rank_of_other_launcher(together | TORCH) is None
        ranks = read_external_launch(together | TORCH)
        assert ranks is not None
        assert (ranks.rank_env.world_size, ranks.words) == (
            8,
            "from RANK and WORLD_SIZE: 8 in all; rank 0 at here:29501",
        )


def test_ranks_of_mpirun_in_a_slurm_job_are_those_of_mpirun() -> None:
    """Its daemons are srun's tasks: one on each node, and what they pass on is not the ranks'
    place."""
    daemon = SLURM | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    ranks = OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5"}
    rank = found(daemon | ranks)
    assert (rank.origin, rank.rank, rank.world_size, rank.master_addr) == (
        "Open MPI",
        5,
        8,
        "node07",
    )


def test_one_node_of_torchruns_arguments_starts_its_own_ranks() -> None:
    assert find_rank_of_other_launcher({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}) is None
    assert found(PET | {"PET_MASTER_PORT": "23456"}).master_port == 23456
    endpoint = {name: value for name, value in PET.items() if name != "PET_MASTER_ADDR"}
    assert found(endpoint | {"PET_RDZV_ENDPOINT": "host:29400"}).words.endswith(
        "rank 0 at host:29400"
    )


def test_what_is_found_is_said_in_torchs_words() -> None:
    environ = dict(OPEN_MPI)
    rank = write_torch_variables_of_launcher(environ)
    assert rank is not None
    assert {name: environ[name] for name in TORCH} == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    assert environ["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert write_torch_variables_of_launcher(environ) is None  # it is torch's by now
    two_jobs = {
        found(OPEN_MPI | {"PMIX_NAMESPACE": f"prterun-host-{job}@1"}).master_port for job in (1, 2)
    }
    assert len(two_jobs) == 2


def test_a_requeued_job_of_slurm_is_another_attempt() -> None:
    ranks = read_external_launch(SLURM | {"SLURM_RESTART_COUNT": "2"})
    assert ranks is not None
    assert ranks.rank_env.attempt == 2


@pytest.fixture
def begun_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainRequest:
    """A command of one task of srun's, whose run has begun and saved step 10."""
    for name, value in (SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).items():
        monkeypatch.setenv(name, value)
    store = open_store_of_run(tmp_path, None)
    manifest = Manifest(10, "", {}, {"step": 10}, {}, {}, {})
    store.commit(store.begin_draft(10), manifest.to_bytes())
    job = load_job(None, ["model.dim=64", f"run.dir={tmp_path}", "precision.compute=fp32"])
    write_json_atomically(tmp_path / "job.json", job.to_json())
    # As the job file says it: what the run chose then holds.
    job = load_job(None, ["model.dim=64", f"run.dir={tmp_path}", "resilience.max_restarts=7"])
    return TrainRequest.for_new_run(job)


class PreparedError(Exception):
    """All is known of the run that would be prepared."""


def train_until_prepared(
    request: TrainRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, bool]:
    """The precision of the job that is trained, and whether its run goes on."""

    def stop(job: Job, run_dir: Path, *, resume: bool, **_: object) -> NoReturn:
        raise PreparedError(job.precision.compute, resume)

    monkeypatch.setattr("phalanx.run.training.prepare_run", stop)
    with pytest.raises(PreparedError) as caught:
        train_in_ranks_or_as_rank(request, RunOutput(), guards_rank=False)
    compute, resume = caught.value.args
    return compute, resume


def test_a_requeued_job_of_one_task_goes_on_with_its_run(
    begun_run: TrainRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a job that is submitted for the first time does not."""
    assert train_until_prepared(begun_run, monkeypatch) == ("auto", False)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert train_until_prepared(begun_run, monkeypatch) == ("fp32", True)
    said = capsys.readouterr().out
    assert "SLURM_RESTART_COUNT is 2" in said
    assert "after step 10" in said
    resumed = load_requeued_run(begun_run.run_dir, begun_run.job)
    assert [change.key for change in resumed.changes] == ["resilience.max_restarts"]


def test_a_requeued_job_that_had_not_begun_begins(
    begun_run: TrainRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    (begun_run.run_dir / "job.json").unlink()
    assert train_until_prepared(begun_run, monkeypatch) == ("auto", False)


def test_a_requeued_job_does_not_go_on_with_the_run_of_another_model(
    begun_run: TrainRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    job = load_job(None, ["model.dim=128", f"run.dir={begun_run.run_dir}"])
    with pytest.raises(JobError, match=r"model\.dim: a resumed run keeps"):
        train_in_ranks_or_as_rank(TrainRequest.for_new_run(job), RunOutput(), guards_rank=False)
