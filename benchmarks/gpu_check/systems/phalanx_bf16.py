"""phalanx as a library: load_job, make_plan, parallelize, Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

import phalanx
from gpu_check.cases import Case
from gpu_check.training import Say, Watch, batch_of, job_and_plan
from phalanx.nn.build import build_model, build_objective
from phalanx.observe.bus import Bus
from phalanx.observe.events import Event
from phalanx.optim.build import build_optimizer
from phalanx.parallel.step_stats import StepStats
from phalanx.resilience.guards import SkippedStepsGuard


@dataclass(frozen=True)
class OneBatch:
    """The data of every step."""

    batch: Mapping[str, torch.Tensor]

    def step_microbatches(self, step: int) -> Sequence[Mapping[str, torch.Tensor]]:
        return [self.batch]


@dataclass(frozen=True)
class Losses:
    """A guard that skips nothing, and remembers."""

    found: list[float] = field(default_factory=list)

    def reason_to_skip(self, step: int, facts: StepStats) -> None:
        self.found.append(facts.loss)


def measure(case: Case, say: Say, *, precision: str = "bf16") -> None:
    watch, losses = Watch(case, say), Losses()

    def count(step: int) -> Sequence[Event]:
        watch.after_step()
        return ()

    job, plan = job_and_plan(case, precision)
    planned = dict(plan.chosen.predicted_bytes)
    say({"planned_bytes": sum(planned.values()), "planned": planned})
    with phalanx.open_mesh(plan.layout, device=plan.device) as mesh:
        watch.start()
        model = phalanx.parallelize(
            build_model(job, plan.model_shape), plan, mesh, seed=job.run.seed
        )
        state = phalanx.TrainState(model, build_optimizer(model, job.optim), job.run.seed)
        bus = Bus(rank=mesh.rank)
        trainer = phalanx.Trainer(
            job,
            plan,
            state,
            bus,
            phalanx.TrainingData(
                OneBatch(batch_of(case, plan)), build_objective(job), records=count
            ),
            guards=(SkippedStepsGuard(limit=10), losses),
        )
        trainer.run()
        bus.close()
    say({"losses": [losses.found[0], losses.found[-1]]})
