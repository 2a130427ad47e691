"""What a search says fits, or lacks, beside every layout of the job planned exactly."""

from __future__ import annotations

from functools import cache

import pytest

from phalanx.job.load import load_job
from phalanx.plan.search.describe import format_search_result
from phalanx.plan.search.finalists import FinalistPlanner, list_job_keys_of_row
from phalanx.plan.search.result import RankedLayout, SearchResult
from phalanx.plan.search.search import search_layouts
from phalanx.plan.search.space import enumerate_layouts
from phalanx.plan.search.task import SearchTask, build_search_task

MIXTURE = ("model.preset=deepseek-moe-16b", "cluster.gpu=h100-sxm", "data.seq_len=2048")
PIPELINE = ("train.global_batch_size=64", "parallel.pp=4", "train.micro_batch_size=1")
ONE_T4 = ("model.preset=gpt2-xl", "cluster.gpu=t4", "parallel.ranks=1", "data.seq_len=1024")


@cache
def build_task(*overrides: str) -> SearchTask:
    return build_search_task(load_job(None, list(overrides)))


def plan_every_layout(task: SearchTask) -> tuple[list[RankedLayout], FinalistPlanner]:
    """(every layout of the job that fits, the fastest first; the planner that refused the rest)."""
    rows = enumerate_layouts(task.job, task.shape, task.cluster, task.num_ranks, task.open_keys)
    planner = FinalistPlanner(task.job, task.shape, task.cluster, task.vocab_size)
    plans = [
        planner.plan_layout(list_job_keys_of_row(task.job, rows, row)) for row in range(len(rows))
    ]
    fitting = [ranked for ranked in plans if ranked is not None]
    return sorted(fitting, key=lambda ranked: ranked.step_s or 0.0), planner


# The screen says that less recomputation fits here than an exact plan takes.
@pytest.mark.parametrize("memory_gib", [46, 47])
def test_more_recomputation_is_tried_where_the_screens_does_not_fit(memory_gib: int) -> None:
    task = build_task(*MIXTURE, *PIPELINE, f"cluster.memory_gib={memory_gib}")
    winner = search_layouts(task).winner
    fitting, _ = plan_every_layout(task)
    assert winner is not None
    assert winner.step_s == fitting[0].step_s
    assert winner.recompute == "full"


@pytest.mark.parametrize(
    "overrides",
    [
        (*MIXTURE, *PIPELINE, "cluster.memory_gib=44"),
        # The figure was 26.9 GiB of a layout that happened to be planned.
        (*ONE_T4, "precision.compute=fp16"),
    ],
)
def test_what_is_said_to_need_least_needs_least_of_all(overrides: tuple[str, ...]) -> None:
    task = build_task(*overrides)
    result = search_layouts(task)
    fitting, planner = plan_every_layout(task)
    assert not fitting
    assert result.winner is None
    assert planner.smallest_shortage is not None
    assert result.smallest_bytes == planner.smallest_shortage.needed_bytes
    verdict = format_search_result(result, task.cluster)[0]
    assert f"the least of {result.num_planned} layouts planned needs" in verdict
    assert SearchResult.from_json(result.to_json()) == result


def test_a_layout_that_is_tried_twice_counts_once() -> None:
    task = build_task(*ONE_T4, "precision.compute=fp16")
    rows = enumerate_layouts(task.job, task.shape, task.cluster, task.num_ranks, task.open_keys)
    planner = FinalistPlanner(task.job, task.shape, task.cluster, task.vocab_size)
    keys = list_job_keys_of_row(task.job, rows, 0)
    assert planner.plan_layout(keys) is planner.plan_layout(keys) is None
    assert planner.num_shortages == 1
    assert sum(planner.refused.values()) == 1
