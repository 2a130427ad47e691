"""Rows of modules that round to bfloat16 by themselves: layouts that are right are equal, and a
sum that is no mean is found."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from commands import PHALANX
from models import CPU
from phalanx.job.module_probe import measure_foreign_shape
from phalanx.job.schema import Job
from phalanx.parallel.model import ParallelModel
from phalanx.verify import rank as verify_rank
from phalanx.verify.cases import list_all_layouts, plan_layout_cases
from phalanx.verify.payloads import VerifyCase, VerifyPayload
from phalanx.verify.row import ROWS_FILE_NAME
from phalanx.verify.verified_job import make_verified_job
from ranks import run_ranks

WITH_A_HEAD_IN_BF16 = """
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.middle = nn.Embedding(257, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 257)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + torch.tanh(self.middle(x))
        weight, bias = self.head.weight.bfloat16(), self.head.bias.bfloat16()
        return F.linear(x.bfloat16(), weight, bias).to(x.dtype)
"""
NUM_RANKS, DTYPES = 2, ("float64", "float32")


def judge(rank: int, job: Job, cases: list[VerifyCase], directory: str, sums: bool) -> None:
    if sums:
        own = ParallelModel.reduce_and_clip

        def doubled(self: ParallelModel, *args: Any, **options: Any) -> Any:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(NUM_RANKS)
            return own(self, *args, **options)

        ParallelModel.reduce_and_clip = doubled  # type: ignore[method-assign]
    verify_rank.run_verify_cases(
        VerifyPayload(job, Path(directory), None, 2, NUM_RANKS, "own", tuple(cases))
    )


def test_a_head_in_bf16_is_judged_by_what_its_rounding_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with_a_head_in_bf16.py").write_text(WITH_A_HEAD_IN_BF16)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    kind = {"kind": "with_a_head_in_bf16:Model"}
    job = make_verified_job(Job.model_validate({"model": kind, "data": {"seq_len": 16}}), NUM_RANKS)
    layouts = [pair for pair in list_all_layouts(NUM_RANKS) if pair[0] in ("ddp", "zero3")]
    cases = []
    for dtype in DTYPES:
        for case in plan_layout_cases(
            job, layouts, num_ranks=NUM_RANKS, cluster=CPU, shape=measure_foreign_shape(job)
        ):
            assert case.plan is not None
            cases.append(VerifyCase(dtype, case.name, case.parallel, case.plan))
    for sums in (False, True):
        directory = tmp_path / f"sums-{sums}"
        directory.mkdir()
        run_ranks(NUM_RANKS, judge, job, cases, str(directory), sums)
        lines = (directory / ROWS_FILE_NAME).read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert len(rows) == len(cases)
        assert {row["ok"] for row in rows} == {not sums}, [row["first"] for row in rows]
        for row in rows:
            # More than is allowed where nothing rounds to bfloat16.
            assert row["errors"]["gradient"] > 1e-4
            assert any("rounds to bfloat16 by itself" in note for note in row["notes"])


# Four gates a layer, whose gradients are sums over all tokens that nearly cancel, in float32.
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
}


@pytest.mark.long
def test_gates_that_compute_in_float32_are_no_difference(tmp_path: Path) -> None:
    """An examiner's false alarm: Qwen3-Next under tp, in float32."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT))
    job = [f"--model=hf:{tmp_path}", "data.seq_len=64", "--types=float64,float32"]
    call = [*PHALANX, "verify", "--ranks=2", "--layouts=ddp,tp2", *job]
    judged = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert judged.returncode == 0, judged.stdout + judged.stderr
    assert "verdict 4 of 4 rows equal the reference" in judged.stdout
