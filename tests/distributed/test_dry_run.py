"""A dry run says what a real run of the same job does: each collective, and the most memory that
tensors take at one time. The reference is a run over gloo that the same tracker follows, and for
collectives also what this run asks of c10d, which needs no tracker to be seen."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from models import CPU
from phalanx.job.load import load_job
from phalanx.job.schema import Job
from phalanx.mesh.c10d_calls import HandlerDepth, Operator, handling_c10d_calls
from phalanx.mesh.mesh import open_mesh
from phalanx.mesh.shared_memory.opening import current_transport
from phalanx.nn.routing import Router
from phalanx.parallel.step_stats import StepStats
from phalanx.plan.communication import (
    cp_sent_bytes_per_step,
    ep_sent_bytes_per_step,
    pp_sent_bytes_per_step,
)
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.workload import build_workload, shard_shape
from phalanx.run.weights import build_training_state
from phalanx.verify.dry_run.collectives import CollectiveCall, CollectiveLog
from phalanx.verify.dry_run.program import DryStepRunner, TrackedPhases, run_dry_step
from phalanx.verify.dry_run.stand_ins import StageBoundarySpec
from phalanx.verify.dry_run.storage_log import StorageLog, build_memory_timeline, find_highest_point
from phalanx.verify.dry_run.tracker import StorageTracker
from ranks import run_ranks
from selected import list_selected_params

RANKS = 4
SMALL = (
    "model.preset=small",
    "model.dim=64",
    "data.seq_len=32",
    "train.micro_batch_size=2",
    f"parallel.ranks={RANKS}",
)
EXPERTS = ("model.num_experts=4", "model.experts_per_token=2", "model.expert_ffn_dim=32")
LAYOUTS = {
    "ddp": ("train.global_batch_size=16",),
    "ddp int8": ("train.global_batch_size=16", "parallel.compress=int8"),
    "ddp powersgd": ("train.global_batch_size=16", "parallel.compress=powersgd"),
    "zero1": ("train.global_batch_size=8", "parallel.dp_shard=4", "parallel.zero_stage=1"),
    "zero2": ("train.global_batch_size=16", "parallel.dp_shard=4", "parallel.zero_stage=2"),
    "zero3": ("train.global_batch_size=16", "parallel.dp_shard=4"),
    "hsdp": ("train.global_batch_size=8", "parallel.dp_shard=2", "parallel.dp_replicate=2"),
    "tp": ("train.global_batch_size=4", "parallel.tp=2", "parallel.sequence_parallel=false"),
    "tp+sp zero3": ("train.global_batch_size=4", "parallel.tp=2", "parallel.dp_shard=2"),
    "cp": ("train.global_batch_size=4", "parallel.cp=2"),
    "ulysses": ("train.global_batch_size=4", "parallel.cp=2", "parallel.cp_attention=ulysses"),
    "1f1b": ("train.global_batch_size=8", "parallel.pp=2"),
    "zb-v": ("train.global_batch_size=8", "parallel.pp=2", "parallel.schedule=zb-v"),
    "ep": ("train.global_batch_size=8", "parallel.dp_shard=4", "parallel.ep=2", *EXPERTS),
    "ep selective": (
        "train.global_batch_size=8",
        "parallel.dp_shard=4",
        "parallel.ep=2",
        "train.recompute=selective",
        *EXPERTS,
    ),
    "ep zero2": (
        "train.global_batch_size=16",
        "parallel.dp_shard=4",
        "parallel.ep=2",
        "parallel.zero_stage=2",
        *EXPERTS,
    ),
    "ep zero2 selective": (
        "train.global_batch_size=16",
        "parallel.dp_shard=4",
        "parallel.ep=2",
        "parallel.zero_stage=2",
        "train.recompute=selective",
        *EXPERTS,
    ),
}
# Zero2 of experts and selective recomputation are in one of the others together; the buckets of DDP
# are beside compression, ZeRO-3 and tp beside each other, copies of shards beside experts, and what
# stages send in another schedule.
LONG = ("ep selective", "ep zero2", "ddp", "zero3", "hsdp", "tp", "1f1b")
CASES = [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in LAYOUTS]
GATHERED = ("zero2", "tp+sp zero3", "ep", "ep zero2 selective")
WITH_FORMULAS = ("cp", "ulysses", "ep", "zb-v")


def plan_small(name: str) -> tuple[Job, Plan]:
    """The job of a layout. A schedule of two stages a rank has four blocks to cut; what is followed
    of a block twice is followed of four as well, in twice the time. Where weights are gathered, a
    block has one before it and one behind it."""
    num_layers = 4 if name in LONG or name == "zb-v" else 3 if name in GATHERED else 2
    job = load_job(None, [*SMALL, f"model.num_layers={num_layers}", *LAYOUTS[name]])
    return job, make_plan(job, cluster=CPU)


def count_without_callers(counts: Counter[CollectiveCall]) -> Counter[CollectiveCall]:
    """Without callers: those of what autograd's C++ starts are other lines."""
    total: Counter[CollectiveCall] = Counter()
    for collective, count in counts.items():
        total[replace(collective, caller="", phase="", purpose="")] += count
    return total


class CallOfC10d(NamedTuple):
    """A call that c10d was asked for: what it does, its group, and the bytes of the whole
    message."""

    kind: str
    group_size: int
    first_rank: int
    num_bytes: int


class C10dCallCounter:
    """Counts every call of c10d's operators, whoever makes it and whatever mode hides it."""

    def __init__(self) -> None:
        self.counts: Counter[CallOfC10d] = Counter()

    def handle(self, operator: Operator, args: Sequence[Any], proceed: Callable[[], Any]) -> Any:
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(args[operator.group_at]))
        message = args[operator.tensors_at]
        if operator.words in ("all_gather", "reduce_scatter"):
            # The larger one of input and output.
            message = max(args[:2], key=sum_bytes)
        kind = "receive" if operator.words == "recv" else operator.words
        self.counts[CallOfC10d(kind, len(ranks), ranks[0], sum_bytes(message))] += 1
        return proceed()


def sum_bytes(tensors: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))


def count_as_calls_of_c10d(counts: Counter[CollectiveCall]) -> Counter[CallOfC10d]:
    """What a dry run noted, in the terms of c10d."""
    total: Counter[CallOfC10d] = Counter()
    for call, count in counts.items():
        total[CallOfC10d(call.kind, call.group_size, call.first_rank, call.num_bytes)] += count
    return total


def follow_real_steps(rank: int, cases: list[tuple[Job, Plan]]) -> list[Any]:
    """Of each job the collectives of a later step, the most bytes in it, its facts, and what the
    step asked of c10d; None where a dry run says nothing of this rank."""
    return [follow_real_step(rank, job, plan) for job, plan in cases]


def list_compared_ranks(plan: Plan) -> tuple[int, ...]:
    """The last one, and of a pipeline the first one, too: it knows the form of what stages hand
    on."""
    return (0, RANKS - 1) if plan.layout.pp > 1 else (RANKS - 1,)


def has_buckets(plan: Plan) -> bool:
    """True under DDP, which sets its buckets anew in a second step, and has ranks agree on them."""
    return plan.parallel.zero_stage <= 1 and plan.layout.pp == 1


def follow_real_step(
    rank: int, job: Job, plan: Plan
) -> tuple[Any, int, StepStats, Counter[CallOfC10d]] | None:
    with open_mesh(plan.layout, device="cpu") as mesh, contextlib.ExitStack() as stack:
        transport = current_transport()
        if transport is not None:
            # As on other devices, which a dry run is of.
            stack.enter_context(transport.sending_messages())
        tracker = StorageTracker(StorageLog(), CollectiveLog(mesh))
        with contextlib.ExitStack() as following:
            # To follow each operation takes longer than the operation.
            if rank in list_compared_ranks(plan):
                following.enter_context(tracker.tracking_storage_resizes())
                following.enter_context(tracker)
            phases = TrackedPhases(tracker)
            state = build_training_state(job, plan, mesh, phases)
            balance_routing(state.model.module)
            runner = DryStepRunner(job, plan, state, tracker, phases)
            for step in range(1, 4 if has_buckets(plan) else 3):
                counter = C10dCallCounter()
                with handling_c10d_calls(counter, HandlerDepth.WATCHES):
                    stats = runner.run(step, plan.num_microbatches)
        if rank not in list_compared_ranks(plan):
            return None
        assert tracker.collectives is not None
        peak = find_highest_point(build_memory_timeline(tracker.log, runner.first_moment))
        return tracker.collectives.counts, peak.total_bytes, stats, counter.counts


def balance_routing(module: nn.Module) -> None:
    """Tokens choose experts in turn, and not by scores: as a dry run takes it."""
    for part in module.modules():
        if isinstance(part, Router):
            part.choose = choose_in_turn


def choose_in_turn(scores_BTE: torch.Tensor, per_token: int) -> torch.Tensor:
    num_rows, num_tokens, num_experts = scores_BTE.shape
    choices = torch.arange(num_rows * num_tokens * per_token) % num_experts
    return choices.view(num_rows, num_tokens, per_token)


def follow_dry_steps(_: int, cases: list[tuple[Job, Plan]]) -> list[dict[int, Any]]:
    """Of each job what dry runs of the compared ranks say."""
    found = []
    for job, plan in cases:
        boundary = StageBoundarySpec()
        by_rank = {}
        for rank in list_compared_ranks(plan):
            step = run_dry_step(job, plan, rank, boundary)
            peak = find_highest_point(build_memory_timeline(step.log, step.first_moment))
            by_rank[rank] = step.counts, peak.total_bytes, step.stats
        found.append(by_rank)
    return found


@pytest.fixture(scope="module")
def followed(request: pytest.FixtureRequest) -> dict[str, tuple[list[Any], dict[int, Any]]]:
    """By name of the layout: what real ranks did, and what dry runs say of some of them."""
    selected = {name for (name,) in list_selected_params(request, "name")} | {*WITH_FORMULAS}
    names = [name for name in LAYOUTS if name in selected]
    cases = [plan_small(name) for name in names]
    real = run_ranks(RANKS, follow_real_steps, cases, deadline_s=400)
    (dry,) = run_ranks(1, follow_dry_steps, cases, deadline_s=400)
    by_name = {}
    for index, name in enumerate(names):
        by_name[name] = [ranks[index] for ranks in real], dry[index]
    return by_name


@pytest.mark.parametrize("name", CASES)
def test_says_what_a_real_run_says_to_others(name: str, followed: Any) -> None:
    real, dry = followed[name]
    for rank, (counts, _, stats) in dry.items():
        expected_counts, _, expected_stats, _ = real[rank]
        assert count_without_callers(counts) == count_without_callers(expected_counts)
        assert stats.sent_bytes == expected_stats.sent_bytes
        assert stats.sent_tp_bytes == expected_stats.sent_tp_bytes
        assert stats.sent_cp_bytes == expected_stats.sent_cp_bytes
        assert stats.sent_ep_bytes == expected_stats.sent_ep_bytes
        assert stats.sent_pp_bytes == expected_stats.sent_pp_bytes


@pytest.mark.parametrize("name", CASES)
def test_says_every_collective_that_c10d_is_asked_for(name: str, followed: Any) -> None:
    real, dry = followed[name]
    for rank, (counts, _, _) in dry.items():
        _, _, _, calls = real[rank]
        assert count_as_calls_of_c10d(counts) == calls


def test_agrees_with_the_formulas_of_the_plan(followed: Any) -> None:
    """Bytes over cp, pp and ep, as the plan predicts them without having seen the program."""
    for name in WITH_FORMULAS[:-1]:
        job, plan = plan_small(name)
        _, dry = followed[name]
        _, _, stats = dry[RANKS - 1]
        work = build_workload(
            job,
            plan.model_shape,
            micro_batch_size=plan.micro_batch_size,
            num_microbatches=plan.num_microbatches,
            tp=plan.layout.tp,
            cp=plan.layout.cp,
            ep=plan.layout.ep,
        )
        work = replace(work, precision=plan.precision)
        shape = shard_shape(plan.model_shape, plan.layout.tp)
        if plan.layout.ep > 1:
            # The plan counts rows; the program sends the counts of rows, too: a number for each
            # expert of other ranks, in each mixture's forward.
            counts = (
                8 * shape.experts.count // 2 * plan.num_microbatches * len(shape.experts.layers)
            )
            assert stats.sent_ep_bytes == ep_sent_bytes_per_step(shape, work) + counts
        else:
            assert stats.sent_cp_bytes == cp_sent_bytes_per_step(shape, work)
    job, plan = plan_small(WITH_FORMULAS[-1])
    _, dry = followed[WITH_FORMULAS[-1]]
    work = build_workload(
        job,
        plan.model_shape,
        micro_batch_size=plan.micro_batch_size,
        num_microbatches=plan.num_microbatches,
        tp=1,
    )
    work = replace(work, precision=plan.precision)
    assert plan.pipeline is not None
    assert dry[RANKS - 1][2].sent_pp_bytes == pp_sent_bytes_per_step(
        plan.model_shape, work, plan.pipeline, rank=1
    )


@pytest.mark.parametrize("name", CASES)
def test_tensors_take_what_they_take_in_a_real_run(name: str, followed: Any) -> None:
    real, dry = followed[name]
    for rank, (_, peak_bytes, _) in dry.items():
        # Never more than really was, but for nothing: tensors that a mesh made are a few bytes.
        assert peak_bytes <= real[rank][1] * 1.0001, rank
        # gloo's threads hold a message for a moment after it was waited for: a unit of FSDP is 3 %
        # here. A grouped product of real tensors holds a copy.
        assert peak_bytes >= real[rank][1] * 0.96, rank
