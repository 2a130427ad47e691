"""The plan's memory is that of the highest moment of a dry run, in each phase. Dry runs are held to
real ones by test_dry_run.py; large jobs by benchmarks/plan_against_dry_run.py."""

from __future__ import annotations

from typing import Any

import pytest

from models import CPU
from phalanx.job.load import load_job
from phalanx.plan.planner import make_plan
from phalanx.verify.dry_run.program import run_dry_step
from phalanx.verify.dry_run.report import sum_planned_tensor_bytes
from phalanx.verify.dry_run.stand_ins import StageBoundarySpec
from phalanx.verify.dry_run.storage_log import build_memory_timeline, find_highest_point
from ranks import run_ranks
from selected import list_selected_params

SMALL = (
    "model.preset=small",
    "model.num_layers=4",
    "model.dim=128",
    "model.num_heads=4",
    "data.seq_len=256",
    "train.micro_batch_size=4",
    "parallel.ranks=4",
)
GELU = (
    "model.norm=layernorm",
    "model.activation=gelu_tanh",
    "model.bias=all",
    "model.ffn_dim=512",
)
EXPERTS = ("model.num_experts=4", "model.experts_per_token=2", "model.expert_ffn_dim=256")
SHARDED = ("parallel.dp_shard=4", "parallel.zero_stage=3")
JOBS = {
    "ddp": ("train.global_batch_size=16",),
    "ddp, 2 microbatches": ("train.global_batch_size=32",),
    "zero1, 2 microbatches": (
        "train.global_batch_size=32",
        "parallel.dp_shard=4",
        "parallel.zero_stage=1",
    ),
    "zero2": ("train.global_batch_size=16", "parallel.dp_shard=4", "parallel.zero_stage=2"),
    "zero3": ("train.global_batch_size=16", *SHARDED),
    "zero3, untied, 4 chunks": (
        "train.global_batch_size=16",
        "model.tie_embeddings=false",
        "train.loss_chunk_tokens=256",
        *SHARDED,
    ),
    "zero3, 2 microbatches, full": (
        "train.global_batch_size=32",
        "train.recompute=full",
        *SHARDED,
    ),
    "tp": ("train.global_batch_size=8", "parallel.tp=2"),
    "one": ("train.global_batch_size=4", "parallel.ranks=1"),
    "gelu": ("train.global_batch_size=16", *GELU),
    "experts": ("train.global_batch_size=16", *EXPERTS),
    "1f1b": ("train.global_batch_size=16", "parallel.ranks=2", "parallel.pp=2"),
}
# What is kept and gathered is so with several microbatches, and untied, too.
IN_OTHERS = ("ddp", "zero3")
QUICK_IN_BF16 = ("zero3, 2 microbatches, full", "gelu", "experts")


def compare(_: int, keys: tuple[str, ...]) -> tuple[float, float]:
    """(bytes of tensors that a plan predicts, bytes of the dry run), of the first rank."""
    job = load_job(None, [*SMALL, *keys])
    plan = make_plan(job, cluster=CPU)
    step = run_dry_step(job, plan, 0, StageBoundarySpec())
    peak = find_highest_point(build_memory_timeline(step.log, step.first_moment))
    return sum(sum_planned_tensor_bytes(plan.memory_of_rank(0)).values()), peak.total_bytes


def compare_all(rank: int, jobs: list[tuple[str, ...]]) -> list[tuple[float, float]]:
    return [compare(rank, keys) for keys in jobs]


@pytest.fixture(scope="module")
def compared(request: pytest.FixtureRequest) -> dict[tuple[str, str], tuple[float, float]]:
    cases = list_selected_params(request, "name", "precision")
    jobs = [(*JOBS[name], f"precision.compute={precision}") for name, precision in cases]
    (results,) = run_ranks(1, compare_all, jobs, deadline_s=400)
    return dict(zip(cases, results, strict=True))


# In bf16 what is kept of a forward is of another size, which each layout shards as in fp32.
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *(
            pytest.param(name, "fp32", marks=[pytest.mark.long] * (name in IN_OTHERS))
            for name in JOBS
        ),
        *(
            pytest.param(name, "bf16", marks=() if name in QUICK_IN_BF16 else pytest.mark.long)
            for name in JOBS
        ),
    ],
)
def test_a_plan_is_near_its_dry_run(name: str, precision: str, compared: dict[Any, Any]) -> None:
    predicted, seen = compared[name, precision]
    assert predicted == pytest.approx(seen, rel=0.03)
