"""Microbatches in flight as the screen of a search has them in closed form, beside the schedules."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.job.load import load_job
from phalanx.plan.pipeline.generate import generate_schedule
from phalanx.plan.pipeline.simulate import compute_peak_activation_bytes
from phalanx.plan.search.counts_by_degree import CountsByDegree
from phalanx.plan.search.memory_screen import MemoryScreen
from phalanx.plan.search.space import SEARCHED_SCHEDULES, enumerate_layouts
from phalanx.plan.search.task import build_search_task
from phalanx.plan.workload import build_workload


def check_screen(
    name: str, stages: int, weight_bytes: int, batch: int, least_microbatches: int
) -> None:
    """Compare what the screen has in flight on 8 stages' first rank with the schedules."""
    keys = ["model.preset=llama3-8b", "cluster.gpu=h100-sxm", "parallel.ranks=8"]
    keys += ["parallel.pp=8", f"parallel.schedule={name}", "data.seq_len=2048"]
    task = build_search_task(load_job(None, [*keys, f"train.global_batch_size={batch}"]))
    rows = enumerate_layouts(task.job, task.shape, task.cluster, task.num_ranks, task.open_keys)
    rows = rows.take(rows.num_microbatches >= least_microbatches)
    rows = rows.take(rows.stages_per_rank == stages)
    assert {SEARCHED_SCHEDULES[index] for index in rows.schedule} == {name}
    work = build_workload(task.job, task.shape, micro_batch_size=1, num_microbatches=1, tp=1)
    screen = MemoryScreen(CountsByDegree(task.shape, work, gathers_ahead=True), rows)
    flight = screen._microbatches_in_flight()
    held = screen._bytes_in_flight(
        flight, np.full(len(rows), 100.0), np.full(len(rows), float(weight_bytes))
    )
    for number in sorted(set(rows.num_microbatches.tolist())):
        schedule = generate_schedule(name, 8, number, stages)
        of_stage = [100] * schedule.num_stages, [weight_bytes] * schedule.num_stages
        expected = max(compute_peak_activation_bytes(schedule, *of_stage)) / stages
        assert held[rows.num_microbatches == number] == pytest.approx(expected), number


@pytest.mark.parametrize(
    ("name", "stages"), [("zb-v", 2), ("dualpipe-v", 2), ("interleaved-zero-bubble", 2)]
)
@pytest.mark.parametrize("weight_bytes", [100, 200, 400, 3000])
def test_a_rank_holds_as_much_as_its_schedule_makes_it(
    name: str, stages: int, weight_bytes: int
) -> None:
    check_screen(name, stages, weight_bytes, 96, 16 if name == "dualpipe-v" else 8)


@pytest.mark.parametrize(("name", "weight_bytes"), [("interleaved", 0), ("1f1b", 0), ("zb-v", 100)])
@pytest.mark.parametrize("batch", [2, 12, 20])
def test_so_it_does_with_few_microbatches_and_in_rounds_of_more_than_there_are_ranks(
    name: str, weight_bytes: int, batch: int
) -> None:
    check_screen(name, 1 if name == "1f1b" else 2, weight_bytes, batch, 1)


@pytest.mark.parametrize("batch", [2, 12, 20])
def test_so_it_does_where_gradients_of_weights_wait(batch: int) -> None:
    check_screen("interleaved-zero-bubble", 2, 200, batch, 1)
