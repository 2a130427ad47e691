"""The job of a run that is suspected: its layout is kept as far as the machine goes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from models import CPU
from phalanx.core.errors import UsageError
from phalanx.job.load import load_job
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.stored_plan import StoredPlanError
from phalanx.run.suspected_job import load_reduced_job_of_run, shrink_degrees_to_ranks
from phalanx.verify.choose import select_layout_cases

RUN = Path(__file__).parents[1] / "golden" / "2026-11-23" / "run"


def test_every_axis_of_a_large_run_stays_an_axis() -> None:
    degrees = {"dp_replicate": 8, "dp_shard": 16, "cp": 1, "tp": 4, "pp": 2}
    fewer = shrink_degrees_to_ranks(degrees, 16)
    assert fewer == {"dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 2, "pp": 2}
    assert shrink_degrees_to_ranks(degrees, 2**20) == degrees


def test_a_run_is_judged_at_the_layout_that_it_had() -> None:
    suspected = load_reduced_job_of_run(RUN, cluster=replace(CPU, memory_bytes=2**40))
    layout = json.loads((RUN / "plan.json").read_text(encoding="utf-8"))["layout"]
    parallel = suspected.job.parallel
    for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"):
        assert getattr(parallel, axis) == layout[axis]
    assert suspected.changes == ()
    assert not suspected.needs_small_widths


def write_run(directory: Path, *overrides: str, **layout_left_open: None) -> Plan:
    """The files of a run with the layout that `overrides` name, of a job that left
    `layout_left_open` to its planner; its plan."""
    job = load_job(None, overrides)
    plan = make_plan(job, cluster=CPU, vocab_size=256)
    body = job.to_json()
    body["parallel"] |= layout_left_open
    (directory / "job.json").write_text(json.dumps(body))
    (directory / "plan.json").write_text(json.dumps(plan.to_json()))
    return plan


EXPERTS = "model.preset=small-mixtral"


@pytest.mark.parametrize(
    "overrides",
    [
        # Whole copies of all but the experts, over dp_shard.
        (EXPERTS, "parallel.ranks=4", "parallel.ep=4"),
        (EXPERTS, "parallel.ranks=4", "parallel.ep=2"),
        (EXPERTS, "parallel.ranks=4", "parallel.cp=2", "parallel.ep=4"),
        (EXPERTS, "parallel.ranks=4", "parallel.dp_shard=4", "parallel.ep=2"),
        # ZeRO over the ranks of cp alone, and whole copies there.
        ("parallel.ranks=4", "parallel.cp=4", "parallel.zero_stage=3"),
        ("parallel.ranks=4", "parallel.cp=4"),
        ("parallel.ranks=4", "parallel.dp_replicate=2", "parallel.cp=2", "parallel.zero_stage=1"),
    ],
)
def test_a_run_is_judged_at_the_zero_stage_that_it_had(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """Whether its job named it or its planner chose it."""
    plan = write_run(tmp_path, *overrides, zero_stage=None)
    suspected = load_reduced_job_of_run(tmp_path, cluster=replace(CPU, memory_bytes=2**40))
    judged = make_plan(suspected.job, cluster=CPU, vocab_size=256)
    assert (judged.layout, judged.parallel.zero_stage) == (plan.layout, plan.parallel.zero_stage)


PIPELINE = (
    "parallel.ranks=2",
    "parallel.pp=2",
    "model.num_layers=6",
    "parallel.stage_blocks=[1,5]",
)


def test_a_run_is_judged_with_the_blocks_that_its_stages_had(tmp_path: Path) -> None:
    write_run(tmp_path, *PIPELINE, stage_blocks=())
    cluster = replace(CPU, memory_bytes=2**40)

    def load(*overrides: str) -> Job:
        return load_reduced_job_of_run(tmp_path, overrides, cluster=cluster).job

    assert load().parallel.stage_blocks == (1, 5)
    # They are said of no other number of blocks.
    assert load("model.num_layers=4").parallel.stage_blocks == ()
    blocks = "parallel.stage_blocks=[1,3]"
    assert load("model.num_layers=4", blocks).parallel.stage_blocks == (1, 3)
    with pytest.raises(UsageError, match=r"parallel\.stage_blocks has no effect"):
        load("parallel.stage_blocks=[2,4]")
    (case,) = select_layout_cases(load(), "asked", ranks=2, steps=1, shrink=True).cases
    assert case.plan is not None, case.refused
    assert sum(case.plan.parallel.stage_blocks) < 6


@pytest.mark.parametrize(
    "key", ["parallel.tp=2", "parallel.ranks=4", "parallel.zero_stage=3", "parallel.schedule=gpipe"]
)
def test_keys_of_another_layout_are_refused_beside_a_run(key: str) -> None:
    """Its own layout won over them without a word."""
    with pytest.raises(UsageError) as refused:
        load_reduced_job_of_run(RUN, ["optim.lr=1e-3", key])
    assert str(refused.value).startswith(f"{key}: {key.partition('=')[0]} has no effect")
    assert f"phalanx verify {RUN / 'job.json'} --layouts NAMES" in str(refused.value)
    others = ["optim.lr=1e-3", "parallel.bucket_mb=1.0"]
    job = load_reduced_job_of_run(RUN, others, cluster=replace(CPU, memory_bytes=2**40)).job
    assert (job.optim.lr, job.parallel.bucket_mb) == (1e-3, 1)


def test_what_does_not_fit_the_machine_is_made_smaller_and_said() -> None:
    suspected = load_reduced_job_of_run(RUN, cluster=replace(CPU, memory_bytes=2**20))
    assert suspected.needs_small_widths
    assert "small widths" in suspected.changes[-1]


def test_sequences_are_as_long_as_the_machine_holds_and_computes_soon() -> None:
    def choose(cores: int, memory_bytes: int) -> int:
        cluster = replace(CPU, num_devices=cores, memory_bytes=memory_bytes)
        overrides = ["data.seq_len=1048576"]
        return load_reduced_job_of_run(RUN, overrides, cluster=cluster).max_seq_len

    assert choose(64, 2**50) == 1048576
    assert 64 < choose(1, 2**50) < 1048576
    assert 64 < choose(64, 2**30) < 1048576
    assert choose(1, 2**20) == 64


def test_on_gpus_a_run_is_judged_on_no_more_ranks_than_there_are(tmp_path: Path) -> None:
    plan = json.loads((RUN / "plan.json").read_text(encoding="utf-8"))
    plan["layout"]["dp_shard"] = 8
    plan["num_microbatches"] = 1
    plan["global_batch_size"] = plan["micro_batch_size"] * 8 * plan["layout"]["dp_replicate"]
    del plan["world_size"]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "job.json").write_bytes((RUN / "job.json").read_bytes())
    gpus = replace(CPU, device="cuda", num_devices=2)
    assert load_reduced_job_of_run(tmp_path, cluster=gpus).num_ranks == 2
    assert load_reduced_job_of_run(tmp_path, cluster=replace(CPU, num_devices=2)).num_ranks == 8


def test_the_job_of_a_run_on_gpus_says_so_on_any_machine(tmp_path: Path) -> None:
    plan = write_run(tmp_path, "parallel.ranks=2")
    assert load_reduced_job_of_run(tmp_path, cluster=CPU).job.cluster.device == "auto"
    on_gpus = plan.to_json() | {"device": "cuda"}
    (tmp_path / "plan.json").write_text(json.dumps(on_gpus))
    assert load_reduced_job_of_run(tmp_path, cluster=CPU).job.cluster.device == "cuda"


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run is there"):
        load_reduced_job_of_run(tmp_path)
    (tmp_path / "job.json").write_bytes((RUN / "job.json").read_bytes())
    with pytest.raises(UsageError, match=r"no plan\.json") as refused:
        load_reduced_job_of_run(tmp_path)
    assert "job.json --layouts" in str(refused.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "the plan cannot be read: it is no JSON"),
        ("[]", "it holds no plan"),
        ("{}", "the plan has no job_digest"),
    ],
)
def test_a_run_whose_plan_is_damaged_is_refused_by_its_name(
    tmp_path: Path, content: str, problem: str
) -> None:
    (tmp_path / "job.json").write_bytes((RUN / "job.json").read_bytes())
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(StoredPlanError) as refused:
        load_reduced_job_of_run(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / 'plan.json'}: {problem}")
