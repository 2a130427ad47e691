"""What `phalanx train` makes of a job that leaves its layout open: the simple choice where it fits,
a search where it does not or where the devices' speed is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.job.load import load_job
from phalanx.job.schema import Job
from phalanx.plan.candidates import NoFitError
from phalanx.plan.cluster import Cluster
from phalanx.plan.described_cluster import choose_cluster_of_job
from phalanx.plan.plan import Plan, compute_job_digest
from phalanx.plan.planner import make_plan
from phalanx.run.choose_layout import choose_layout

GIB = 2**30
CORES = Cluster("cpu", 4, 64 * GIB)
LARGE = ["model.dim=512", "model.num_layers=12", "data.seq_len=1024", "parallel.ranks=4"]


def load(*overrides: str) -> Job:
    return load_job(None, [*LARGE, "precision.compute=fp32", *overrides])


def test_the_simple_choice_stays_where_it_fits():
    chosen = choose_layout(load(), cluster=CORES)
    assert chosen.keys == {}
    plan = chosen.make_plan(load(), cluster=CORES)
    assert plan == make_plan(load(), cluster=CORES)


def test_where_copies_and_zero_do_not_fit_the_simplest_that_does_is_trained():
    job = load("cluster.memory_gib=2.2")
    with pytest.raises(NoFitError):
        make_plan(job, cluster=CORES)
    chosen = choose_layout(job, cluster=CORES)
    plan = chosen.make_plan(job, cluster=CORES)
    assert plan.chosen.fits
    assert plan.job_digest == compute_job_digest(job)
    assert plan.reasons[0] == chosen.reason
    assert "the fewest mechanisms that fit" in chosen.reason
    # The plan says all that ranks read: stored and read again it is the same.
    assert Plan.from_json(plan.to_json()) == plan


def test_what_the_job_fixes_is_refused_with_what_would_fit():
    job = load("cluster.memory_gib=2.2", "parallel.zero_stage=1")
    with pytest.raises(NoFitError) as raised:
        choose_layout(job, cluster=CORES)
    advice = str(raised.value.fix)
    overrides = [word for word in advice.split(";")[0].split() if "=" in word]
    assert make_plan(
        load_job(None, [*LARGE, "precision.compute=fp32", "cluster.memory_gib=2.2", *overrides]),
        cluster=CORES,
    ).chosen.fits


def test_on_gpus_of_the_table_the_fastest_is_chosen_and_its_time_is_in_the_plan():
    job = load_job(None, ["model.preset=llama3-8b", "data.seq_len=8192", "cluster.gpu=h100-sxm"])
    cluster = replace(choose_cluster_of_job(job), is_described=False)
    job = load_job(None, ["model.preset=llama3-8b", "data.seq_len=8192"])
    plan = choose_layout(job, cluster=cluster).make_plan(job, cluster=cluster)
    assert plan.step_time is not None
    assert plan.step_time.low_s < plan.step_time.total_s < plan.step_time.high_s
    assert "the fastest by prediction" in plan.reasons[0]
    assert Plan.from_json(plan.to_json()) == plan


def test_a_layout_that_the_job_says_is_left_alone():
    job = load_job(
        None,
        [
            "model.preset=llama3-8b",
            "data.seq_len=8192",
            "cluster.gpu=h100-sxm",
            "parallel.tp=8",
            "train.micro_batch_size=1",
        ],
    )
    cluster = choose_cluster_of_job(job)
    assert choose_layout(job, cluster=cluster).keys == {}
