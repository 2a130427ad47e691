"""Trainer's call of before 0.1's nouns: it warns, and trains and saves as the new one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import phalanx
from models import CPU
from phalanx.checkpoint.manifest import read_manifest
from phalanx.job.schema import Job
from phalanx.train.evaluation import Evaluation

JOB = Job.model_validate(
    {
        "data": {"seq_len": 1},
        "train": {"global_batch_size": 4, "steps": 3},
        "optim": {"lr": 0.1, "warmup_steps": 0},
        "parallel": {"ranks": 1},
    }
)
Batch = dict[str, torch.Tensor]


class Lines:
    def step_microbatches(self, step: int) -> list[Batch]:
        inputs = torch.arange(4.0).view(4, 1) + step
        return [{"inputs": inputs, "targets": 2 * inputs}]


def squared_tensor_error(
    outputs: torch.Tensor, batch: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    return (outputs - batch["targets"]).square().sum(), torch.tensor(len(outputs))


def train(build: Callable[..., phalanx.Trainer]) -> tuple[str, torch.Tensor, Evaluation]:
    """The end, the weights and an evaluation of a trainer that `build` makes of its parts."""
    torch.manual_seed(0)
    plan = phalanx.make_plan(JOB, cluster=CPU, num_ranks=1)
    with phalanx.open_mesh(plan.layout, device="cpu") as mesh:
        model = phalanx.parallelize(nn.Linear(1, 1), plan, mesh)
        state = phalanx.TrainState(model, phalanx.build_optimizer(model, JOB.optim), seed=7)
        bus = phalanx.Bus(rank=0)
        trainer = build(plan, mesh, state, bus)
        end_reason = trainer.run()
        bus.close()
        return end_reason, model.module.weight.detach().clone(), trainer.evaluate()


def test_the_old_call_warns_and_does_the_same(tmp_path: Path) -> None:
    held_out = {"": Lines().step_microbatches(0)}

    def call_old(plan: Any, mesh: Any, state: Any, bus: Any) -> phalanx.Trainer:
        with pytest.warns(DeprecationWarning, match="goes with 0.2"):
            return phalanx.Trainer(  # type: ignore[call-arg]
                JOB,
                plan,
                mesh,
                state,
                bus=bus,
                data=Lines(),
                objective=squared_tensor_error,
                held_out=held_out,
                run_dir=tmp_path / "old",
            )

    def call_new(plan: Any, mesh: Any, state: Any, bus: Any) -> phalanx.Trainer:
        data = phalanx.TrainingData(Lines(), squared_tensor_error, held_out)
        storage = phalanx.RunStorage.open(tmp_path / "new")
        return phalanx.Trainer(JOB, plan, state, bus, data, storage=storage)

    assert train(call_old) == train(call_new)
    old, new = (
        read_manifest(tmp_path / name / "checkpoints" / "step-3") for name in ("old", "new")
    )
    assert old.tensors == new.tensors
