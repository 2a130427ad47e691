"""Waiting for a rank that is late is charged to "collective", over its axis and operation, and to no
other phase: in HSDP, in gathers through shared memory, where DDP finds unused parameters, and in
ZeRO-1's messages over gloo."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from models import VOCAB, decoder, global_batches, plan, share
from phalanx.core.phases import PhaseTimer
from phalanx.core.process_stat import read_run_and_delay_s
from phalanx.mesh.mesh import open_mesh
from phalanx.mesh.shared_memory import futex
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.parallelize import parallelize
from ranks import run_ranks

OBJECTIVE = causal_cross_entropy(16)
LATE_S = 0.4
# A sleep is never shorter; a rank that waits may begin to wait later.
LEAST_WAIT_S = 0.8 * LATE_S
SHARED_MEMORY = pytest.mark.skipif(not futex.is_supported(), reason="words of x86-64 Linux")


@dataclass(frozen=True)
class Seconds:
    """Of one rank: by phase, of collectives by axis and operation, and by the kernel those in which
    it had a processor, and those for which others had the one that it wanted.

    Whatever a rank computes itself, however slowly, is no waiting: it begins to wait later by it.
    """

    by_phase: dict[str, float]
    by_collective: dict[str, float]
    processor_s: float
    queued_s: float

    def has_waited_in(self, collective: str) -> bool:
        return self._is_wait(self.by_collective[collective] + self.processor_s + self.queued_s)

    def has_no_wait_in(self, phase: str) -> bool:
        return not self._is_wait(self.by_phase[phase] - self.processor_s - self.queued_s)

    def has_no_wait_in_collective(self, collective: str) -> bool:
        return not self._is_wait(self.by_collective[collective] - self.processor_s - self.queued_s)

    def _is_wait(self, seconds: float) -> bool:
        return seconds >= LEAST_WAIT_S


def allow_for_queues(of_ranks: Sequence[Seconds]) -> list[Seconds]:
    """The seconds of all ranks in one step, each with those that any had no processor: by so much
    it may begin to wait later, and its own work take longer."""
    queued_s = sum(each.queued_s for each in of_ranks)
    return [replace(each, queued_s=queued_s) for each in of_ranks]


def take_seconds(model: ParallelModel, work: Callable[[], object]) -> Seconds:
    before = read_run_and_delay_s(os.getpid())
    work()
    after = read_run_and_delay_s(os.getpid())
    processor_s, queued_s = (end_s - begin_s for begin_s, end_s in zip(before, after, strict=True))
    phases_s = model.phases.take()
    return Seconds(phases_s, model.phases.take_communication(), processor_s, queued_s)


def train_step(model: ParallelModel, batches: list[dict[str, torch.Tensor]]) -> Seconds:
    def train() -> None:
        with model.phases("backward"):
            model.forward_backward(batches, OBJECTIVE)

    return take_seconds(model, train)


def train_with_late_backward(rank: int, collectives: Any, late_rank: int) -> Seconds:
    """HSDP over two replicas of two ranks, the second step of two microbatches: the late rank
    sleeps in the backward of the last block of the last one."""
    a_plan = plan(4, 1, dp_replicate=2, dp_shard=2, zero_stage=3)
    module = decoder(tied=True, dtype=torch.float32)
    is_late = False

    def sleep(*_: object) -> None:
        if is_late and rank == late_rank:
            time.sleep(LATE_S)

    with open_mesh(a_plan.layout, device="cpu", collectives=collectives) as mesh:
        model = parallelize(module, a_plan, mesh, phases=PhaseTimer())
        last = [each for each in module.modules() if isinstance(each, nn.Linear)][-2]
        last.register_full_backward_hook(sleep)
        batches = share(global_batches(1)[0], rank, 4, 1)
        train_step(model, batches)
        is_late = True
        return train_step(model, batches)


@pytest.mark.parametrize("collectives", ["gloo", pytest.param("shared", marks=SHARED_MEMORY)])
def test_the_other_replica_waits_in_the_all_reduce_and_not_in_its_backward(
    collectives: str,
) -> None:
    of_ranks = run_ranks(4, train_with_late_backward, collectives, 0)
    late, neighbour, *other_replica = allow_for_queues(of_ranks)
    assert late.by_phase["backward"] >= LATE_S
    assert late.has_no_wait_in_collective("dp: all_reduce gradients"), late
    # Of the same replica: it waits where gradients are scattered.
    assert neighbour.has_waited_in("dp: reduce_scatter gradients"), neighbour
    for rank in other_replica:
        assert rank.has_waited_in("dp: all_reduce gradients"), rank
        assert rank.has_no_wait_in("backward"), rank


class HalfFrozen(nn.Module):
    """Two blocks, the first of them frozen, and a pause before them."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup, self.out = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.blocks[0].requires_grad_(False)
        self.pause_s = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.lookup(inputs)
        time.sleep(self.pause_s)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.out(x)
        return out


def gather_behind_late_forward(rank: int) -> list[Seconds]:
    """Of an evaluation, and of a step: rank 0 sleeps before the gather of a frozen unit."""
    a_plan = plan(2, 1, dp_shard=2, zero_stage=3)
    torch.manual_seed(0)
    module = HalfFrozen()
    with open_mesh(a_plan.layout, device="cpu", collectives="shared") as mesh:
        model = parallelize(module, a_plan, mesh, phases=PhaseTimer())
        batches = share(global_batches(1)[0], rank, 2, 1)
        train_step(model, batches)
        if rank == 0:
            module.pause_s = LATE_S

        def evaluate() -> None:
            with model.phases("forward"):
                model.evaluate(batches, OBJECTIVE)

        return [take_seconds(model, evaluate), train_step(model, batches)]


@SHARED_MEMORY
def test_gathers_through_shared_memory_wait_in_their_phase() -> None:
    for of_ranks in zip(*run_ranks(2, gather_behind_late_forward), strict=True):
        late, waiting = allow_for_queues(of_ranks)
        assert waiting.has_waited_in("dp: all_gather parameters"), waiting
        assert waiting.has_no_wait_in("forward"), waiting
        assert late.has_no_wait_in_collective("dp: all_gather parameters"), late


class OneNeverUsed(nn.Module):
    """`never` has no part in a loss; `sleep` is called in the backward of the first layer."""

    def __init__(self, sleep: Callable[..., None]) -> None:
        super().__init__()
        self.lookup, self.out = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.never, self.middle = nn.Linear(8, 8), nn.Linear(8, 8)
        self.middle.register_full_backward_hook(sleep)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.middle(self.lookup(inputs)))
        return out


def train_with_unused(rank: int) -> list[Seconds]:
    """Three steps of DDP, of which rank 0 is late in the last two."""
    a_plan = plan(2, 1, dp_replicate=2, unused_parameters="allow")
    is_late = False

    def sleep(*_: object) -> None:
        if is_late and rank == 0:
            time.sleep(LATE_S)

    torch.manual_seed(0)
    with open_mesh(a_plan.layout, device="cpu") as mesh:
        model = parallelize(OneNeverUsed(sleep), a_plan, mesh, phases=PhaseTimer())
        batches = share(global_batches(1)[0], rank, 2, 1)
        train_step(model, batches)
        is_late = True
        steps = [train_step(model, batches) for _ in range(2)]
        assert sorted(model.unused_parameters) == ["never.bias", "never.weight"]
        return steps


def test_a_parameter_that_is_never_used_hides_no_waiting() -> None:
    for of_ranks in zip(*run_ranks(2, train_with_unused), strict=True):
        late, waiting = allow_for_queues(of_ranks)
        assert waiting.has_waited_in("dp: all_reduce gradients"), waiting
        assert waiting.has_no_wait_in("backward"), waiting
        assert late.by_phase["backward"] >= LATE_S


def train_zero1(rank: int) -> Seconds:
    """A step of ZeRO-1 with a bucket for each parameter, to whose backward rank 0 comes late."""
    a_plan = plan(2, 1, dp_shard=2, zero_stage=1, bucket_mb=1e-4)
    is_late = False

    def sleep(*_: object) -> None:
        if is_late and rank == 0:
            time.sleep(LATE_S)

    torch.manual_seed(0)
    with open_mesh(a_plan.layout, device="cpu", collectives="shared") as mesh:
        module = decoder(tied=False, dtype=torch.float32)
        model = parallelize(module, a_plan, mesh, phases=PhaseTimer())
        module.blocks[-1].register_full_backward_pre_hook(sleep)
        batches = share(global_batches(1)[0], rank, 2, 1)
        for _ in range(2):
            train_step(model, batches)
        is_late = True
        return train_step(model, batches)


def test_zero1_waits_for_its_rows_in_their_phase() -> None:
    late, waiting = allow_for_queues(run_ranks(2, train_zero1))
    assert waiting.has_waited_in("dp: reduce_scatter gradients"), waiting
    assert waiting.has_no_wait_in("backward"), waiting
    assert late.by_phase["backward"] >= LATE_S
