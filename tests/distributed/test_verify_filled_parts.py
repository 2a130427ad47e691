"""Rows of a user's module in float64 build it as training builds large ones: without memory, and
each rank fills its parts. What it fills is held beside the module that one process builds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from models import CPU
from phalanx.job.module_probe import measure_foreign_shape
from phalanx.job.schema import Job
from phalanx.mesh.logical import LogicalShard
from phalanx.mesh.rebuilt_init import RebuiltInitialization
from phalanx.mesh.recorded_init import RecordedInitialization
from phalanx.verify import rank as verify_rank
from phalanx.verify.cases import list_all_layouts, plan_layout_cases
from phalanx.verify.payloads import VerifyCase, VerifyPayload
from phalanx.verify.rank import FILLED_IN_PARTS
from phalanx.verify.row import ROWS_FILE_NAME
from phalanx.verify.verified_job import make_verified_job
from ranks import run_ranks

DRAWN_TWICE = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.middle = nn.Embedding(257, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 257)
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        return self.head(hidden + torch.tanh(self.middle(hidden)))


class Reading(Model):
    # Fake tensors have no numbers: it is built whole, twice.
    def __init__(self):
        super().__init__()
        assert self.embed.weight.abs().max().item() > 0
"""
NUM_RANKS = 2


def judge_rows(
    rank: int, job: Job, cases: list[VerifyCase], directory: str, is_filled_wrongly: bool
) -> None:
    if is_filled_wrongly:
        for initialization in (RecordedInitialization, RebuiltInitialization):
            _scale_filled_shards(initialization)
    verify_rank.run_verify_cases(
        VerifyPayload(job, Path(directory), None, 2, NUM_RANKS, "own", tuple(cases))
    )


def _scale_filled_shards(initialization: Any) -> None:
    fill = initialization.fill_parameter_shards

    def fill_wrongly(self: Any, shards: Mapping[str, LogicalShard]) -> None:
        fill(self, shards)
        shards["middle.weight"].tensor.mul_(1.001)

    initialization.fill_parameter_shards = fill_wrongly


@pytest.mark.parametrize(
    ("name", "names", "dtypes"),
    [
        ("Model", ("ddp", "zero3", "zero3-units2-whole"), ("float64", "float32")),
        # Where nothing is filled in parts it is another module like any.
        ("Reading", ("ddp", "zero3"), ("float64",)),
    ],
)
def test_parts_that_ranks_fill_wrongly_differ_in_float64(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    names: tuple[str, ...],
    dtypes: tuple[str, ...],
) -> None:
    (tmp_path / "drawn_twice.py").write_text(DRAWN_TWICE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    model = {"kind": f"drawn_twice:{name}"}
    job = make_verified_job(
        Job.model_validate({"model": model, "data": {"seq_len": 16}}), NUM_RANKS
    )
    layouts = [pair for pair in list_all_layouts(NUM_RANKS) if pair[0] in names]
    shape = measure_foreign_shape(job)
    planned = plan_layout_cases(job, layouts, num_ranks=NUM_RANKS, cluster=CPU, shape=shape)
    cases = [
        VerifyCase(dtype, case.name, case.parallel, case.plan)
        for dtype in dtypes
        for case in planned
        if case.plan is not None
    ]
    assert {case.name for case in cases} == set(names)
    for is_filled_wrongly in (False, True):
        directory = tmp_path / f"wrong-{is_filled_wrongly}"
        directory.mkdir()
        run_ranks(NUM_RANKS, judge_rows, job, cases, str(directory), is_filled_wrongly)
        rows = [json.loads(line) for line in (directory / ROWS_FILE_NAME).read_text().splitlines()]
        assert len(rows) == len(cases)
        for row in rows:
            # Training builds what is not large as one process does; and another row of a layout
            # gives each rank the same parts.
            is_filled = row["dtype"] == "float64" and row["layout"] in ("ddp", "zero3")
            assert (FILLED_IN_PARTS in row["judged"]) == is_filled
            assert row["ok"] == (not (is_filled and is_filled_wrongly)), row["first"]
            if not row["ok"]:
                assert row["first"]["what"] == "initial weight"
                assert row["first"]["name"] == "middle.weight"
                assert "fill their parts" in row["first"]["cause"]
