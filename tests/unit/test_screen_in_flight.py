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


@pytest.mark.parametrize(
    ("name", "stages"), [("zb-v", 2), ("dualpipe-v", 2), ("interleaved-zero-bubble", 2)]
)
@pytest.mark.parametrize("weight_bytes", [100, 200, 400, 3000])
def test_a_rank_holds_as_much_as_its_schedule_makes_it(
    name: str, stages: int, weight_bytes: int
) -> None:
    keys = ["model.preset=llama3-8b", "cluster.gpu=h100-sxm", "parallel.ranks=8"]
    keys += ["parallel.pp=8", f"parallel.schedule={name}", "data.seq_len=2048"]
    task = build_search_task(load_job(None, [*keys, "train.global_batch_size=96"]))
    rows = enumerate_layouts(task.job, task.shape, task.cluster, task.num_ranks, task.open_keys)
    rows = rows.take(rows.num_microbatches >= (16 if name == "dualpipe-v" else 8))
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
        assert held[rows.num_microbatches == number] == pytest.approx(expected)
