"""Layouts on the ranks that are left: what they keep of the plan, and when all ranks are tried
again."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx import load_job, make_plan
from phalanx.core.errors import LayoutError
from phalanx.job.copies import apply_job_keys
from phalanx.job.schema import Job
from phalanx.plan.cluster import Cluster
from phalanx.run.choose_layout import choose_layout
from phalanx.run.elastic_layout import ElasticLayout

CORES = Cluster("cpu", 4, 64 << 30)
OPEN_LAYOUT = (
    *("model.dim=512", "model.num_layers=12", "data.seq_len=256", "precision.compute=fp32"),
    *("parallel.ranks=4", "resilience.min_ranks=2", "resilience.on_oom=recompute"),
)
"""Of a job that does not say how its ranks share the model."""


def lay_out(job: Job) -> ElasticLayout:
    """The layout that `phalanx train` gives a job on four cores."""
    chosen = choose_layout(job, cluster=CORES)
    plan, replan = chosen.make_plan(job, cluster=CORES), partial(make_plan, cluster=CORES)
    run: Any = SimpleNamespace(job=job, plan=plan, replan=replan, chosen_keys=chosen.keys)
    return ElasticLayout(run)


def test_a_rank_that_comes_and_goes_is_tried_less_and_less_often() -> None:
    """Each time it is gone again, twice as many checkpoints pass before the next try."""
    keys = ["parallel.ranks=4", "parallel.dp_replicate=4", "train.global_batch_size=12"]
    job = load_job(None, [*keys, "resilience.min_ranks=2"])
    elastic = lay_out(job)
    num_saves_before_growth = []
    for _ in range(4):
        assert elastic.shrink() == 3
        num_saves = 0
        while not elastic.should_grow():
            elastic.note_checkpoint()
            num_saves += 1
        num_saves_before_growth.append(num_saves)
        assert elastic.grow() == 4
        assert not elastic.should_grow()
    assert num_saves_before_growth == [1, 2, 4, 8]


def explain(*keys: str) -> tuple[int | None, str]:
    job = load_job(None, [*keys])
    elastic = lay_out(job)
    return elastic.shrink(), elastic.explain_no_shrink()


def test_a_layout_that_cannot_become_smaller_says_why() -> None:
    assert explain("parallel.ranks=2", "parallel.tp=2", "resilience.min_ranks=1") == (
        None,
        "tp=2 has no smaller layout, for only data parallelism shrinks",
    )
    two_of_tp = ("parallel.ranks=4", "parallel.tp=2", "parallel.dp_replicate=2")
    assert explain(*two_of_tp, "resilience.min_ranks=3") == (
        None,
        "the next smaller layout has 2 ranks, and resilience.min_ranks is 3",
    )
    # Three ranks do not divide the batch.
    four = ("parallel.ranks=4", "parallel.dp_replicate=4", "train.global_batch_size=8")
    num_ranks, why = explain(*four, "resilience.min_ranks=3")
    assert num_ranks is None
    assert why.startswith("the next smaller layout is refused: ")
    assert "batch" in why
    assert explain("parallel.ranks=2", "parallel.tp=2") == (None, "")


def test_those_ranks_go_on_that_hold_all_of_the_state() -> None:
    """Of two replicas of two shards each, two ranks are needed: not two with the same shard."""
    keys = ("parallel.ranks=4", "parallel.dp_replicate=2", "parallel.dp_shard=2")
    job = load_job(None, [*keys, "resilience.min_ranks=2"])
    elastic = lay_out(job)
    assert elastic.shrink() == 2
    chosen = [elastic.choose_survivors([r for r in range(4) if r != gone]) for gone in range(4)]
    assert chosen == [[1, 2], [0, 3], [0, 1], [0, 1]]
    assert elastic.choose_survivors([0, 2]) == [0, 2]


def test_experts_stay_spread_over_whole_copies() -> None:
    """Where ep alone makes dp_shard, a smaller layout does not shard the model: the ranks that go
    on hold all of it."""
    keys = ("model.preset=small-mixtral", "parallel.ranks=4", "parallel.ep=2")
    elastic = lay_out(load_job(None, [*keys, "resilience.min_ranks=2"]))
    assert str(elastic.plan.layout) == "dp_replicate=2 x dp_shard=2 x ep=2"
    assert elastic.shrink() == 2
    assert str(elastic.plan.layout) == "dp_shard=2 x ep=2"
    assert elastic.plan.parallel.zero_stage == 0
    assert "ZeRO" not in elastic.describe_last_change()


@pytest.mark.parametrize(("memory_gib", "stage"), [(2.2, 1), (2.0, 2)])
def test_the_stage_that_the_plan_chose_stays(memory_gib: float, stage: int) -> None:
    """And microbatches get smaller where a rank's larger share of the batch would not fit."""
    keys = ("train.global_batch_size=24", f"cluster.memory_gib={memory_gib}")
    elastic = lay_out(load_job(None, [*OPEN_LAYOUT, *keys]))
    assert (elastic.plan.parallel.zero_stage, elastic.plan.num_microbatches) == (stage, 1)
    assert elastic.shrink() == 3
    assert str(elastic.plan.layout) == "dp_shard=3"
    assert (elastic.plan.parallel.zero_stage, elastic.plan.num_microbatches) == (stage, 2)
    assert elastic.lessen_memory()
    assert str(elastic.plan.layout) == "dp_shard=3"
    assert elastic.plan.parallel.zero_stage == stage
    assert elastic.grow() == 4
    assert elastic.plan.parallel.zero_stage == stage


def test_a_rank_does_one_sample_at_a_time_before_the_run_ends() -> None:
    keys = ("train.global_batch_size=24", "cluster.memory_gib=1.3")
    elastic = lay_out(load_job(None, [*OPEN_LAYOUT, *keys]))
    assert (elastic.plan.micro_batch_size, elastic.plan.num_microbatches) == (6, 1)
    assert elastic.shrink() == 3
    assert (elastic.plan.micro_batch_size, elastic.plan.num_microbatches) == (1, 8)


def test_another_stage_is_said() -> None:
    """The one that the plan chose does not fit on fewer ranks, whatever their microbatches."""
    job = load_job(None, [*OPEN_LAYOUT, "train.global_batch_size=24", "cluster.memory_gib=2.2"])
    chosen = choose_layout(job, cluster=CORES)

    def refuse_stage_1(job: Job) -> Any:
        if job.parallel.zero_stage == 1:
            raise LayoutError("zero1 does not fit")
        return make_plan(job, cluster=CORES)

    plan = chosen.make_plan(job, cluster=CORES)
    run: Any = SimpleNamespace(job=job, plan=plan, replan=refuse_stage_1, chosen_keys=chosen.keys)
    elastic = ElasticLayout(run)
    assert elastic.shrink() == 3
    before, _, after = elastic.describe_last_change().partition(" -> ")
    assert "dp_shard=4, ZeRO-1" in before
    assert "dp_shard=3, ZeRO-3" in after


SEARCHED = {
    "parallel.ranks": 4,
    "parallel.tp": 2,
    "parallel.dp_replicate": 2,
    "train.micro_batch_size": 4,
}


def test_what_a_search_chose_stays() -> None:
    job = load_job(None, [*OPEN_LAYOUT, "train.global_batch_size=24", "cluster.memory_gib=1.8"])
    plan = make_plan(apply_job_keys(job, SEARCHED), cluster=CORES)
    replan = partial(make_plan, cluster=CORES)
    run: Any = SimpleNamespace(job=job, plan=plan, replan=replan, chosen_keys=SEARCHED)
    elastic = ElasticLayout(run)
    assert elastic.list_memory_advice()[0].startswith("less     train.recompute=full")
    assert elastic.shrink() == 2
    assert str(elastic.plan.layout) == "tp=2"
    assert (elastic.plan.micro_batch_size, elastic.plan.num_microbatches) == (4, 6)
    assert "train.recompute=full from here on" in elastic.lessen_memory()
    assert str(elastic.plan.layout) == "tp=2"
    assert elastic.grow() == 4
    assert str(elastic.plan.layout) == "dp_replicate=2 x tp=2"
    assert elastic.plan.activations.recompute == "full"
    assert elastic.lessen_memory() == ""


def test_stages_of_a_pipeline_are_cut_as_they_were_where_blocks_are_recomputed() -> None:
    keys = ("parallel.pp=2", "train.global_batch_size=24", "model.vocab_size=32768")
    elastic = lay_out(load_job(None, [*OPEN_LAYOUT, *keys]))
    blocks = elastic.plan.parallel.stage_blocks
    assert elastic.lessen_memory()
    assert elastic.plan.parallel.stage_blocks == blocks
    recomputed = load_job(None, [*OPEN_LAYOUT, *keys, "train.recompute=full"])
    assert make_plan(recomputed, cluster=CORES).parallel.stage_blocks != blocks
