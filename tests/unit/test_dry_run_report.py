"""The torch-free half of a dry run: kinds of rank, reports as JSON, the cache, words."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.core.errors import LayoutError
from phalanx.job.load import load_job
from phalanx.job.schema import Job
from phalanx.plan.cluster import Cluster
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.verify.dry_run.describe import describe_dry_run
from phalanx.verify.dry_run.messages import (
    decode_dry_run_request,
    encode_dry_run_request,
    rebuild_worker_error,
)
from phalanx.verify.dry_run.rank_kinds import RankKind, choose_rank_kinds
from phalanx.verify.dry_run.report import CollectiveRow, DryRunReport, RankKindReport, TimelineRow
from phalanx.verify.dry_run.result_cache import ResultCache

ROOM = Cluster("cpu", 64, 2**40)


def plan_small(*keys: str) -> tuple[Job, Plan]:
    job = load_job(None, ["model.preset=small", *keys])
    return job, make_plan(job, cluster=ROOM)


def make_report(kind: RankKind, peak_bytes: int = 1000) -> RankKindReport:
    row = CollectiveRow(
        "all_gather",
        "dp_shard",
        4,
        0,
        400,
        300.0,
        "forward",
        "all_gather parameters",
        "a.py:1 f",
        6,
    )
    return RankKindReport(
        kind.name,
        kind.rank,
        kind.stages,
        peak_bytes,
        "backward of blocks.3, microbatch 0",
        {"parameters": 600, "activations": 400},
        {"parameters": 600, "activations": 450},
        (row,),
        (TimelineRow("forward of embed, microbatch 0", 700, {"parameters": 600}),),
        num_traced=3,
        num_microbatches=8,
        num_operations=10,
        wall_s=1.5,
    )


def test_without_a_pipeline_one_rank_stands_for_all() -> None:
    _, plan = plan_small("parallel.ranks=8", "parallel.tp=2")
    assert choose_rank_kinds(plan) == [RankKind("every rank", 0)]
    assert [kind.rank for kind in choose_rank_kinds(plan, all_kinds=True)] == [0, 7]


def test_of_a_pipeline_the_first_the_last_and_the_fullest_rank() -> None:
    _, plan = plan_small("parallel.ranks=8", "parallel.pp=4", "model.num_layers=8")
    kinds = choose_rank_kinds(plan)
    assert [kind.rank for kind in kinds] == [0, 6]
    assert kinds[0].stages == (0,)
    assert kinds[-1].stages == (3,)
    assert [kind.rank for kind in choose_rank_kinds(plan, all_kinds=True)] == [0, 2, 4, 6]
    _, v_shaped = plan_small(
        "parallel.ranks=4", "parallel.pp=4", "model.num_layers=8", "parallel.schedule=zb-v"
    )
    # The rank with the first stage has the last one, too.
    assert choose_rank_kinds(v_shaped)[0].stages == (0, 7)


def test_a_report_goes_through_json() -> None:
    report = make_report(RankKind("every rank", 0))
    assert RankKindReport.from_json(report.to_json()) == report
    assert report.to_json()["sent_bytes_by_axis"] == {"dp_shard": 1800.0}
    assert report.plan_error == pytest.approx(0.05)


def test_a_request_goes_through_json() -> None:
    job, plan = plan_small("parallel.ranks=2", "parallel.pp=2")
    kind, boundary = (
        choose_rank_kinds(plan)[0],
        {"shape": [1, 2], "dtype": "float32", "num_tokens": 0},
    )
    assert decode_dry_run_request(encode_dry_run_request(job, plan, kind, boundary)) == (
        job,
        plan,
        kind,
        boundary,
    )


def test_an_error_goes_through_json() -> None:
    error = rebuild_worker_error(LayoutError("what", why="why", fix="fix").to_json())
    assert isinstance(error, LayoutError)
    assert str(error) == "what (why); fix"


def test_results_are_kept_for_the_same_program_alone(tmp_path: Path) -> None:
    job, plan = plan_small("parallel.ranks=4")
    kind = RankKind("every rank", 0)
    cache = ResultCache(job, plan, tmp_path)
    assert cache.find(kind) is None
    cache.add(kind, make_report(kind))
    found = ResultCache(job, plan, tmp_path).find(kind)
    assert found is not None
    assert found.is_cached
    assert found.peak_bytes == 1000
    other_job, other_plan = plan_small("parallel.ranks=4", "model.dim=64")
    assert ResultCache(other_job, other_plan, tmp_path).find(kind) is None
    moved = load_job(None, ["model.preset=small", "parallel.ranks=4", f"run.dir={tmp_path}"])
    assert ResultCache(moved, plan, tmp_path).find(kind) is not None


def test_a_damaged_result_is_run_again(tmp_path: Path) -> None:
    job, plan = plan_small("parallel.ranks=4")
    kind = RankKind("every rank", 0)
    cache = ResultCache(job, plan, tmp_path)
    cache.add(kind, make_report(kind))
    (file,) = tmp_path.iterdir()
    file.write_text('{"name": 3}')
    assert cache.find(kind) is None


def test_words_say_the_peak_the_difference_and_what_was_taken_for_granted() -> None:
    kinds = (make_report(RankKind("pipeline rank 0", 0, (0,))),)
    report = DryRunReport("pp=4", 4, "cuda", 2000, True, kinds)
    lines = describe_dry_run(report)
    text = "\n".join(lines)
    assert "1000 B of tensors at most, in backward of blocks.3, microbatch 0" in text
    assert "+5.0 % of that" in text
    assert "6 x all_gather of 400 B over dp_shard (4 ranks): all_gather parameters" in text
    assert "balanced routing" in text
    assert "kernels are those of a CPU" in text
