"""Small decoders that the Trainer itself trains, in ranks that are running already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from models import BATCH, CPU, SEQ_LEN, VOCAB, fill, global_batches, share
from phalanx.job.schema import Job
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import causal_cross_entropy
from phalanx.observe.bus import Bus
from phalanx.optim.build import build_optimizer
from phalanx.parallel.executor import Objective
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.train.state import TrainState
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import TrainingData

STEPS = 4
BuildOptimizer = Callable[[Sequence[nn.Parameter], ParallelModel, Job], torch.optim.Optimizer]


@dataclass(frozen=True)
class Steps:
    """The batches of one rank."""

    rank: int
    num_ranks: int
    num_microbatches: int

    def step_microbatches(self, step: int) -> Sequence[Mapping[str, torch.Tensor]]:
        batches = global_batches(STEPS)
        return share(batches[step - 1], self.rank, self.num_ranks, self.num_microbatches)

    def list_sample_numbers(self, step: int) -> NDArray[np.int64]:
        rows = {"rows": torch.arange((step - 1) * BATCH, step * BATCH)}
        microbatches = share(rows, self.rank, self.num_ranks, self.num_microbatches)
        return np.stack([each["rows"].numpy() for each in microbatches])


@dataclass(frozen=True)
class Case:
    """A layout ([parallel] keys) and more keys of a job."""

    ranks: int = 1
    parallel: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    job: dict[str, dict[str, Any]] = field(default_factory=dict)


def job_of(case: Case) -> Job:
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "dim": 32,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "ffn_dim": 40,
            **case.model,
        },
        "data": {"seq_len": SEQ_LEN},
        "train": {"global_batch_size": BATCH, "micro_batch_size": 3, "steps": STEPS},
        "checkpoint": {"at_end": False},
        "observe": {"invariants_every": 2},
        "parallel": {"ranks": case.ranks, **case.parallel},
    }
    for section, keys in case.job.items():
        sections[section] = {**sections.get(section, {}), **keys}
    return Job.model_validate(sections)


def build_usual_optimizer(
    before: Sequence[nn.Parameter], model: ParallelModel, job: Job
) -> torch.optim.Optimizer:
    """`before`: the parameters that the module had before it was made parallel."""
    return build_optimizer(model, job.optim)


def train_case(
    rank: int,
    case: Case,
    folder: Path,
    *,
    objective: Objective | None = None,
    optimizer: BuildOptimizer = build_usual_optimizer,
    change: Callable[[Trainer], None] = lambda trainer: None,
    device: torch.device | None = None,
    evaluates: bool = False,
    prepare: Callable[[nn.Module], None] = lambda module: None,
) -> None:
    """Train STEPS steps with events in `folder`. `change` may spoil the trainer before it runs, and
    `prepare` the module before it is made parallel.

    `evaluates`: the batch of the first step, as the job's [eval] says.
    """
    job = job_of(case)
    plan: Plan = make_plan(job, cluster=CPU, vocab_size=VOCAB)
    bus = Bus(rank=rank, run_dir=folder)
    module = Decoder(plan.model_shape)
    fill(module)
    prepare(module)
    with open_mesh(plan.layout, device="cpu") as mesh:
        if device is not None:
            mesh = replace(mesh, device=device)
        before = list(module.parameters())
        model = parallelize(module, plan, mesh, seed=3)
        state = TrainState(model, optimizer(before, model, job), seed=7)
        place = (mesh.data_parallel_rank, plan.layout.data_parallel_size, plan.num_microbatches)
        batches = Steps(*place)
        data = TrainingData(
            batches,
            objective or causal_cross_entropy(16),
            sample_numbers=batches.list_sample_numbers,
            held_out={"": batches.step_microbatches(1)} if evaluates else None,
        )
        trainer = Trainer(job, plan, state, bus, data)
        change(trainer)
        assert trainer.run() == "finished"
    bus.close()
