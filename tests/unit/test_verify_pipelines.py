"""Which pipelines `verify` judges, with which batch and which blocks; what a difference between
stages looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from models import CPU
from phalanx.job.schema import Job
from phalanx.plan.pipeline.generate import SCHEDULE_NAMES, generate_schedule
from phalanx.plan.pipeline.schedule import save_schedule_csv
from phalanx.verify.batches import resplit_steps_into_microbatches
from phalanx.verify.cases import Case, list_all_layouts, plan_layout_cases, select_axes_set_by_job
from phalanx.verify.pipelines import count_blocks_for_stages, list_pipeline_layouts
from phalanx.verify.verified_job import make_verified_job, shrink_job


def cases_of(num_ranks: int, num_layers: int, **parallel: Any) -> dict[str, Case]:
    """The pipelines among all layouts; with `parallel` the one that a job asks for."""
    model = {"num_layers": num_layers, "dim": 64, "num_heads": 8, "num_kv_heads": 8}
    job = make_verified_job(Job.model_validate({"model": model, "parallel": parallel}), num_ranks)
    layouts = (
        [("asked", select_axes_set_by_job(job))]
        if parallel
        else list(list_pipeline_layouts(num_ranks))
    )
    cases = plan_layout_cases(job, layouts, num_ranks=num_ranks, cluster=CPU, shape=None)
    return {case.name: case for case in cases}


def test_every_schedule_is_judged_alone_with_fsdp_with_tp_and_with_both() -> None:
    for num_ranks, places in (
        (4, ("pp4", "pp2-zero3", "pp2-tp2")),
        (8, ("pp8", "pp4-zero3", "pp4-tp2", "pp2-zero3-tp2")),
    ):
        names = dict(list_all_layouts(num_ranks))
        for place in places:
            assert {f"{place}-{schedule}" for schedule in SCHEDULE_NAMES} <= set(names)
    both = names["pp2-zero3-tp2-zb-v"]
    assert both == {"pp": 2, "schedule": "zb-v", "dp_shard": 2, "zero_stage": 3, "tp": 2}


def test_two_schedules_without_replicas_run_many_microbatches_and_the_others_the_fewest() -> None:
    for name, case in cases_of(8, 16).items():
        plan = case.plan
        assert plan is not None, case.refused
        assert plan.pipeline is not None
        place = name.removesuffix("-1f1b").removesuffix("-zb-v").removesuffix("-odd-sequence")
        is_many = place in ("pp8", "pp4-tp2", "pp2-tp4")
        assert plan.pipeline.num_microbatches == (24 if is_many else 2 * plan.layout.pp), name
        assert plan.num_microbatches == plan.pipeline.num_microbatches
        assert plan.micro_batch_size * plan.num_microbatches * plan.layout.data_parallel_size == 48


def test_stages_that_exceed_the_blocks_are_refused_and_the_others_are_not() -> None:
    cases = cases_of(4, 4)
    refused = {name for name, case in cases.items() if case.refused}
    assert refused == {f"pp4-{schedule}" for schedule in SCHEDULE_NAMES[2:]}
    assert all(
        "4 blocks cannot be cut into the 8 stages" in cases[name].refused for name in refused
    )


def test_uneven_stages_are_of_the_model_that_is_judged() -> None:
    case = cases_of(2, 5)["pp2-uneven-1f1b"]
    assert case.plan is not None
    assert case.plan.pipeline is not None
    assert (case.parallel["stage_blocks"], case.plan.pipeline.stages.num_blocks) == ((1, 4), (1, 4))


def test_a_job_that_asks_for_a_pipeline_is_judged_in_it() -> None:
    parallel = {"pp": 2, "schedule": "interleaved", "stages_per_rank": 3, "last_stage": ("norm",)}
    plan = cases_of(4, 6, **parallel)["asked"].plan
    assert plan is not None
    assert plan.pipeline is not None
    assert (plan.pipeline.schedule_name, plan.pipeline.num_stages) == ("interleaved", 6)
    assert (plan.layout.pp, plan.layout.data_parallel_size, plan.pipeline.last_stage) == (
        2,
        2,
        ("norm",),
    )


def test_what_a_pipeline_cannot_do_is_refused_and_other_layouts_are_judged() -> None:
    job = make_verified_job(Job.model_validate({"train": {"offload_activations": True}}), 2)
    layouts = [(name, axes) for name, axes in list_all_layouts(2) if name in ("ddp", "pp2-1f1b")]
    ddp, pipeline = plan_layout_cases(job, layouts, num_ranks=2, cluster=CPU, shape=None)
    assert ddp.plan is not None
    assert "train.offload_activations" in pipeline.refused


def test_the_batch_grows_until_a_schedule_from_a_file_has_its_microbatches(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    save_schedule_csv(generate_schedule("1f1b", 2, 5), path)
    plan = cases_of(4, 4, pp=2, schedule_file=str(path))["asked"].plan
    assert plan is not None
    assert (plan.num_microbatches, plan.global_batch_size) == (5, 120)


@pytest.mark.parametrize(
    ("parallel", "num_blocks"),
    [
        ({"dp_shard": 4}, 0),
        ({"pp": 4}, 3),
        ({"pp": 4, "schedule": "zb-v"}, 7),
        ({"pp": 2, "schedule": "interleaved", "stages_per_rank": 4}, 7),
    ],
)
def test_shrunk_models_keep_the_blocks_that_pipelines_need(
    parallel: dict[str, Any], num_blocks: int
) -> None:
    assert count_blocks_for_stages([parallel]) == num_blocks
    small, said = shrink_job(
        Job.model_validate({"model": {"preset": "llama3-8b"}}), num_blocks=num_blocks
    )
    assert small.model.num_layers == max(2, num_blocks)
    assert f"num_layers 32 -> {max(2, num_blocks)}" in said


def test_microbatches_are_split_again_and_no_row_moves() -> None:
    steps = [[{"inputs": torch.arange(start, start + 4)} for start in (0, 4)]]
    again = resplit_steps_into_microbatches(steps, 4)
    assert [batch["inputs"].tolist() for batch in again[0]] == [[0, 1], [2, 3], [4, 5], [6, 7]]
