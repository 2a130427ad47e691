"""phalanx's own trainer as a library: your data, your objects, its loop, guards and checkpoints.

python examples/library_trainer.py runs/library
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import phalanx


class Squares:
    """Microbatches as a pure function of the step: resuming needs no state.

    Here: squares modulo 97.
    """

    def __init__(self, plan: phalanx.Plan) -> None:
        self.plan = plan

    def step_microbatches(self, step: int) -> Sequence[Mapping[str, torch.Tensor]]:
        batch, length = self.plan.micro_batch_size, self.plan.seq_len
        start = torch.arange(batch)[:, None] * 7 + step
        numbers = (start + torch.arange(length + 1)) ** 2 % 97
        return [{"inputs": numbers[:, :-1], "targets": numbers[:, 1:]}]


def main(run_dir: Path) -> phalanx.TrainState:
    overrides = [
        "train.steps=40",
        "train.global_batch_size=8",
        "data.seq_len=32",
        "model.num_layers=2",
    ]
    overrides += [
        "model.dim=64",
        "model.vocab_size=97",
        "optim.warmup_steps=5",
        "checkpoint.every_steps=20",
    ]
    job = phalanx.load_job(None, overrides)
    plan = phalanx.make_plan(job, num_ranks=1)
    with phalanx.open_mesh(plan.layout, device="cpu") as mesh:
        model = phalanx.parallelize(
            phalanx.build_model(job, plan.model_shape), plan, mesh, seed=job.run.seed
        )
        optimizer = phalanx.build_optimizer(model, job.optim)
        state = phalanx.TrainState(model, optimizer, job.run.seed)
        bus = phalanx.Bus(rank=mesh.rank, run_dir=run_dir)
        trainer = phalanx.Trainer(
            job,
            plan,
            state,
            bus,
            phalanx.TrainingData(Squares(plan), phalanx.build_objective(job)),
            storage=phalanx.RunStorage.open(run_dir),
            guards=(phalanx.SkippedStepsGuard(limit=10),),
        )
        print(trainer.run(), f"after {state.step} steps; checkpoints in {run_dir / 'checkpoints'}")
        bus.close()
    return state


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/library"))
