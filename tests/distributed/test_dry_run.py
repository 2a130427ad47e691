"""A dry run says what a real run of the same job does: each collective, and the most memory that
tensors take at one time. The reference is a run over gloo that the same tracker follows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from models import CPU
from phalanx.job.load import load_job
from phalanx.job.schema import Job
from phalanx.mesh.mesh import open_mesh
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.run.weights import build_state
from phalanx.verify.dry_run.collectives import Collective, CollectiveLog
from phalanx.verify.dry_run.program import StepRunner, WatchedPhases, run_dry_step
from phalanx.verify.dry_run.storage_log import StorageLog, find_peak, read_timeline
from phalanx.verify.dry_run.tracker import StorageTracker
from ranks import run_ranks

RANKS = 4
SMALL = (
    "model.preset=small",
    "model.num_layers=3",
    "model.dim=64",
    "data.seq_len=48",
    "train.micro_batch_size=2",
    "train.global_batch_size=16",
)
LAYOUTS = {
    "ddp": (),
    "zero1": ("parallel.dp_shard=4", "parallel.zero_stage=1"),
    "zero2": ("parallel.dp_shard=4", "parallel.zero_stage=2"),
    "zero3": ("parallel.dp_shard=4",),
    "hsdp": ("parallel.dp_shard=2", "parallel.dp_replicate=2"),
}


def plan_small(*keys: str) -> tuple[Job, Plan]:
    job = load_job(None, [*SMALL, f"parallel.ranks={RANKS}", *keys])
    return job, make_plan(job, cluster=CPU)


def count_without_callers(counts: Counter[Collective]) -> Counter[Collective]:
    """Callers of what autograd's C++ starts are not the same lines, and a rank of a group is as
    good as another."""
    total: Counter[Collective] = Counter()
    for collective, count in counts.items():
        total[replace(collective, caller="", phase="", purpose="")] += count
    return total


def follow_real_step(rank: int, job: Job, plan: Plan) -> tuple[Any, int, Any]:
    """The collectives of a third step, the most bytes in it, and its facts: in the second one DDP
    sets its buckets anew, which ranks agree on."""
    with open_mesh(plan.layout, device="cpu") as mesh:
        tracker = StorageTracker(StorageLog(), CollectiveLog(mesh))
        with tracker.following_sizes(), tracker:
            phases = WatchedPhases(tracker)
            runner = StepRunner(job, plan, build_state(job, plan, mesh, phases), tracker, phases)
            for step in (1, 2, 3):
                stats = runner.run(step)
        assert tracker.collectives is not None
        peak = find_peak(read_timeline(tracker.log, runner.first_moment))
        return tracker.collectives.counts, peak.total_bytes, stats


def follow_dry_step(rank: int, job: Job, plan: Plan) -> tuple[Any, int, Any]:
    step = run_dry_step(job, plan, rank)
    peak = find_peak(read_timeline(step.log, step.first_moment))
    return step.collectives.counts, peak.total_bytes, step.stats


@pytest.mark.parametrize("name", LAYOUTS)
def test_as_a_real_run(name: str) -> None:
    job, plan = plan_small(*LAYOUTS[name])
    real = run_ranks(RANKS, follow_real_step, job, plan)
    for rank in {0, RANKS - 1}:
        (dry,) = run_ranks(1, lambda _: follow_dry_step(rank, job, plan))
        counts, peak_bytes, stats = real[rank]
        assert count_without_callers(dry[0]) == count_without_callers(counts)
        assert dry[2].sent_bytes == stats.sent_bytes
        assert dry[1] == pytest.approx(peak_bytes, rel=0.001)
