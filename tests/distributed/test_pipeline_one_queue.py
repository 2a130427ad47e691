"""Pipelines on a device whose queue is strict: a receive keeps back whatever the rank does later
until its message is there, and a send until somebody takes it.

So NCCL can behave; here gloo does, by sends and receives that block.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from bare_loop import Trace, train_in_microbatches
from models import fill
from models import shape as small_shape
from phalanx.nn.models.decoder import Decoder
from phalanx.parallel.pipeline import transform as pp
from phalanx.parallel.pipeline.p2p import PipelineProcessGroups
from pipelines import LAYERS, LR, SCHEDULES, Case, in_pipelines, token_batches, worst
from ranks import run_ranks


class Done:
    def wait(self) -> None:
        pass


class PeersInOneQueue(PipelineProcessGroups):
    """Nothing of this rank goes on beside a message: the strictest that a device can be."""

    is_one_queue = True

    def start_send(self, tensor: torch.Tensor, target: int) -> Any:
        dist.send(tensor, self.numbers[target], group=self.choose_process_group(self.rank, target))
        return Done()

    def start_receive(self, tensor: torch.Tensor, source: int) -> Any:
        dist.recv(tensor, self.numbers[source], group=self.choose_process_group(source, self.rank))
        return Done()


def decoder() -> Decoder:
    module = Decoder(small_shape(tied=True, num_layers=LAYERS))
    fill(module)
    return module.double()


def compute_reference(rank: int) -> Trace:
    return train_in_microbatches(decoder(), token_batches(), micro=16, lr=LR, max_norm=0.5)


def train_in_one_queue(
    rank: int, num_ranks: int, cases: list[Case], references: dict[str, Trace]
) -> Any:
    pp.PipelineProcessGroups = PeersInOneQueue  # type: ignore[misc]
    return in_pipelines(rank, num_ranks, cases, references)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_schedule_ends_with_equal_weights_where_receives_block(num_ranks: int) -> None:
    reference = run_ranks(1, compute_reference)[0]
    cases = [
        Case(name, decoder, {"pp": num_ranks, "schedule": name}, reference="bare loop")
        for name in SCHEDULES
    ]
    found = run_ranks(
        num_ranks, train_in_one_queue, num_ranks, cases, {"bare loop": reference}, deadline_s=300.0
    )
    off = {
        case.name: worst([mine[at] for mine in found], reference, 1e-10)
        for at, case in enumerate(cases)
    }
    assert {name: errors for name, errors in off.items() if errors} == {}
