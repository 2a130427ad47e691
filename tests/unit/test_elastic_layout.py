"""When a run on fewer ranks tries all of them again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from phalanx import load_job, make_plan
from phalanx.run.elastic_layout import ElasticLayout


def test_a_rank_that_comes_and_goes_is_tried_less_and_less_often() -> None:
    """Each time it is gone again, twice as many checkpoints pass before the next try."""
    keys = ["parallel.ranks=4", "parallel.dp_replicate=4", "train.global_batch_size=12"]
    job = load_job(None, [*keys, "resilience.min_ranks=2"])
    run: Any = SimpleNamespace(job=job, plan=make_plan(job), replan=make_plan)
    elastic = ElasticLayout(run)
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
    run: Any = SimpleNamespace(job=job, plan=make_plan(job), replan=make_plan)
    elastic = ElasticLayout(run)
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
    run: Any = SimpleNamespace(job=job, plan=make_plan(job), replan=make_plan)
    elastic = ElasticLayout(run)
    assert elastic.shrink() == 2
    chosen = [elastic.choose_survivors([r for r in range(4) if r != gone]) for gone in range(4)]
    assert chosen == [[1, 2], [0, 3], [0, 1], [0, 1]]
    assert elastic.choose_survivors([0, 2]) == [0, 2]
