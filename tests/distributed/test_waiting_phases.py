"""Waiting for a rank that is late is charged to "collective", over its axis and operation, and to no
other phase: in HSDP, in gathers through shared memory, and where DDP finds unused parameters."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from models import VOCAB, decoder, global_batches, plan, share
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.mesh import open_mesh
from phalanx.mesh.shared_memory import futex
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.parallelize import parallelize
from ranks import run_ranks

OBJECTIVE = causal_cross_entropy(16)
LATE_S = 0.4
# A sleep is never shorter; a rank that waits may begin to wait a little later.
LEAST_WAIT_S = 0.8 * LATE_S
SHARED_MEMORY = pytest.mark.skipif(not futex.is_supported(), reason="words of x86-64 Linux")
Seconds = tuple[dict[str, float], dict[str, float]]


def train_step(model: ParallelModel, batches: list[dict[str, torch.Tensor]]) -> Seconds:
    """Seconds by phase, and those of collectives by axis and operation."""
    with model.phases("backward"):
        model.forward_backward(batches, OBJECTIVE)
    phases_s = model.phases.take()
    return phases_s, model.phases.take_communication()


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
    late, neighbour, *other_replica = run_ranks(4, train_with_late_backward, collectives, 0)
    assert late[0]["backward"] >= LATE_S
    assert late[1]["dp: all_reduce gradients"] < LEAST_WAIT_S
    # Of the same replica: it waits where gradients are scattered.
    assert neighbour[1]["dp: reduce_scatter gradients"] >= LEAST_WAIT_S
    for phases_s, communication_s in other_replica:
        assert communication_s["dp: all_reduce gradients"] >= LEAST_WAIT_S
        assert phases_s["backward"] < LEAST_WAIT_S


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
        with model.phases("forward"):
            model.evaluate(batches, OBJECTIVE)
        evaluation = model.phases.take(), model.phases.take_communication()
        return [evaluation, train_step(model, batches)]


@SHARED_MEMORY
def test_gathers_through_shared_memory_wait_in_their_phase() -> None:
    late, waiting = run_ranks(2, gather_behind_late_forward)
    for phases_s, communication_s in waiting:
        assert communication_s["dp: all_gather parameters"] >= LEAST_WAIT_S
        assert phases_s["forward"] < LEAST_WAIT_S
    for _, communication_s in late:
        assert communication_s["dp: all_gather parameters"] < LEAST_WAIT_S


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
    late, waiting = run_ranks(2, train_with_unused)
    for phases_s, communication_s in waiting:
        assert communication_s["dp: all_reduce gradients"] >= LEAST_WAIT_S
        assert phases_s["backward"] < LEAST_WAIT_S
    for phases_s, _ in late:
        assert phases_s["backward"] >= LATE_S
