"""What the record of steps counts, by a trainer on one rank."""

from __future__ import annotations

import time

import torch
from torch import nn

import phalanx
from models import CPU
from phalanx.job.schema import Job
from phalanx.observe.events import Event, StepFinished, TimeBetweenSteps

JOB = Job.model_validate(
    {
        "data": {"seq_len": 1},
        "train": {"global_batch_size": 4, "steps": 1},
        "optim": {"lr": 0.1, "warmup_steps": 0},
        "parallel": {"ranks": 1},
    }
)
EMITTING_S = 0.05


class Lines:
    def step_microbatches(self, step: int) -> list[dict[str, torch.Tensor]]:
        inputs = torch.arange(4.0).view(4, 1) + step
        return [{"inputs": inputs, "targets": 2 * inputs}]


def squared_error(
    outputs: torch.Tensor, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    return (outputs - batch["targets"]).square().sum(), torch.tensor(len(outputs))


class SlowBus(phalanx.Bus):
    """Takes its time for the start-up, as the first event of a process does."""

    def __init__(self) -> None:
        super().__init__(rank=0)
        self.startup_emitted_s = self.step_emitted_s = self.step_s = 0.0

    def emit(self, event: Event) -> None:
        if isinstance(event, TimeBetweenSteps) and event.activity == "startup":
            time.sleep(EMITTING_S)
            self.startup_emitted_s = time.perf_counter()
        elif isinstance(event, StepFinished):
            self.step_emitted_s, self.step_s = time.perf_counter(), event.step_s


def test_the_first_step_begins_when_the_start_up_is_emitted() -> None:
    """A restart ends with that event: a step that began before it would have its seconds twice."""
    plan, bus = phalanx.make_plan(JOB, cluster=CPU, num_ranks=1), SlowBus()
    with phalanx.open_mesh(plan.layout, device="cpu") as mesh:
        model = phalanx.parallelize(nn.Linear(1, 1), plan, mesh)
        state = phalanx.TrainState(model, phalanx.build_optimizer(model, JOB.optim), seed=7)
        data = phalanx.TrainingData(Lines(), squared_error)
        phalanx.Trainer(JOB, plan, state, bus, data).run(time.monotonic())
    assert 0 < bus.step_s <= bus.step_emitted_s - bus.startup_emitted_s
