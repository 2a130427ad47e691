"""Tensor parallelism of modules that are not phalanx's own, judged by `verify` against the plain
loop in float64."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

import tp_zoo
from models import CPU
from phalanx.job.schema import Job
from phalanx.job.shapes.measured import MeasuredModule
from phalanx.verify import rank as verify_rank
from phalanx.verify.cases import plan_layout_cases
from phalanx.verify.payloads import VerifyCase, VerifyPayload
from phalanx.verify.row import ROWS_FILE_NAME
from phalanx.verify.verified_job import make_verified_job
from ranks import run_ranks

SHAPE = MeasuredModule("tp_zoo", 2, 20_000, 20_000, 4_000, 8_000)  # for the plan's memory alone
LAYOUTS = {
    "tp4": {"tp": 4},
    "tp4-chunks": {"tp": 4, "tp_chunks": 2},
    "ddp-tp2": {"tp": 2, "dp_replicate": 2},
    "zero3-tp2": {"tp": 2, "dp_shard": 2, "zero_stage": 3},
}


CHUNKED = ("attention", "gqa_per_token", "conv1d", "fused_gate")


def zoo_job(name: str, **parallel: Any) -> Job:
    model = {"kind": f"tp_zoo:{name}"}
    if name.startswith("dict_head"):
        model["objective"] = "tp_zoo:dict_objective"
    return Job.model_validate(
        {"model": model, "data": {"seq_len": tp_zoo.SEQ_LEN}, "parallel": parallel}
    )


Wanted = dict[str, tuple[Job, tuple[str, ...]]]
"""name -> (job, layouts to judge it in)."""


def judge_jobs(rank: int, wanted: Wanted, directory: str) -> None:
    for name, (wanted_job, layouts) in wanted.items():
        job = make_verified_job(wanted_job, 4)
        chosen = [(layout, LAYOUTS[layout]) for layout in layouts]
        cases = plan_layout_cases(job, chosen, num_ranks=4, cluster=CPU, shape=SHAPE)
        work = [
            VerifyCase("float64", case.name, case.parallel, case.plan)
            for case in cases
            if case.plan is not None
        ]
        folder = Path(directory) / name
        folder.mkdir(exist_ok=True)
        verify_rank.run_verify_cases(VerifyPayload(job, folder, None, 1, 4, name, tuple(work)))


def rows_of(wanted: Wanted) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        run_ranks(4, judge_jobs, wanted, directory)
        rows = [
            json.loads(line)
            for name in wanted
            for line in (Path(directory) / name / ROWS_FILE_NAME).read_text().splitlines()
        ]
    return {f"{row['model']} {row['layout']}": row for row in rows}


def require_equal(wanted: Wanted) -> None:
    rows = rows_of(wanted)
    assert len(rows) == sum(len(layouts) for _, layouts in wanted.values())
    assert {
        name: row["refused"] or row["first"] for name, row in rows.items() if not row["ok"]
    } == {}
    assert all(row["errors"]["gradient"] > 0 for row in rows.values()), "something was compared"


@pytest.mark.long
def test_every_module_equals_the_plain_loop() -> None:
    """At tp 4 alone, and at tp 2 beside DDP or ZeRO-3, in turn."""
    wanted: Wanted = {}
    for number, (name, degrees) in enumerate(tp_zoo.RULED.items()):
        beside = ("ddp-tp2", "zero3-tp2")[number % 2]
        wanted[name] = (zoo_job(name), ("tp4", beside) if 4 in degrees else (beside,))
    require_equal(wanted)


@pytest.mark.long
def test_every_module_in_every_layout() -> None:
    layouts = {2: ("ddp-tp2", "zero3-tp2"), 4: ("tp4", "tp4-chunks", "ddp-tp2", "zero3-tp2")}
    require_equal(
        {name: (zoo_job(name), layouts[max(degrees)]) for name, degrees in tp_zoo.RULED.items()}
    )


def test_chunks_of_modules_of_your_own() -> None:
    """Columns that are entered together, and those that cannot be (Conv1D); with and without a
    cut sequence."""
    require_equal({name: (zoo_job(name), ("tp4-chunks",)) for name in CHUNKED})
