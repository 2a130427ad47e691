"""A step that was not finite because a rank computed wrongly once is computed again and applied: the
run has the bits of one in which nothing happened. One that stays so is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.nn.objective import causal_cross_entropy
from phalanx.observe.bus import Bus
from phalanx.observe.events import Event, NonFiniteFound
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import TrainingData
from ranks import run_ranks
from resuming import (
    CPU,
    VOCAB,
    RandomSteps,
    differing,
    job_for,
    new_module,
    new_state,
    whole_tensors,
)

STRUCK, STEPS, MICROBATCHES = 3, 4, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "zero1": {"zero_stage": 1},
    "zero3": {"zero_stage": 3},
}


class SpoiledGradients:
    """The objective, whose gradients are not finite `times` times from step STRUCK on. The loss
    stays what it is."""

    def __init__(self, times: int) -> None:
        self.times, self.step = times, 0
        self._objective = causal_cross_entropy(64)

    def __call__(self, outputs: Any, batch: Any) -> Any:
        if outputs.requires_grad and self.step >= STRUCK and self.times:
            self.times -= 1
            outputs.register_hook(lambda gradient: gradient * float("inf"))
        return self._objective(outputs, batch)


class HeardEvents(Bus):
    def __init__(self, rank: int) -> None:
        super().__init__(rank=rank)
        self.heard: list[Event] = []

    def emit(self, event: Event) -> None:
        self.heard.append(event)
        super().emit(event)


def train_steps(rank: int, mesh: Mesh, job: Any, plan: Plan, times: int) -> dict[str, Any]:
    state = new_state(mesh, job, plan, new_module(torch.float32, dropout=0.1))
    objective, bus = SpoiledGradients(times), HeardEvents(rank)
    trainer = Trainer(
        job, plan, state, bus, TrainingData(RandomSteps(rank, 2, MICROBATCHES), objective)
    )
    reasons = []
    for objective.step in range(1, STEPS + 1):
        reasons.append(trainer.step()[1])
    found = [event for event in bus.heard if isinstance(event, NonFiniteFound)]
    return {"weights": whole_tensors(state), "reasons": reasons, "found": found}


def strike_and_compare(rank: int, layout: str) -> dict[str, Any]:
    job = job_for(2, **LAYOUTS[layout])
    plan = make_plan(job, cluster=CPU, vocab_size=VOCAB)
    with open_mesh(plan.layout, device="cpu") as mesh:
        calm = train_steps(rank, mesh, job, plan, 0)
        # A microbatch of one rank; then each of a whole step and of its repetition.
        once = train_steps(rank, mesh, job, plan, 1 if rank == 1 else 0)
        twice = train_steps(rank, mesh, job, plan, 2 * MICROBATCHES if rank == 1 else 0)
    return {
        "differing": differing(calm["weights"], once["weights"]),
        "calm": calm,
        "once": once,
        "twice": twice,
    }


@pytest.mark.parametrize("layout", ["ddp", "zero3", pytest.param("zero1", marks=pytest.mark.long)])
def test_a_step_that_is_finite_when_it_is_repeated_is_applied(layout: str) -> None:
    for rank, seen in enumerate(run_ranks(2, strike_and_compare, layout)):
        assert seen["differing"] == []
        assert seen["once"]["reasons"] == [None] * STEPS
        assert seen["twice"]["reasons"] == [None, None, "nonfinite_gradients", None]
        assert seen["calm"]["found"] == []
        for times, was_repeated in (("once", True), ("twice", False)):
            found = seen[times]["found"]
            assert [(each.step, each.was_repeated) for each in found] == (
                [(STRUCK, was_repeated)] if rank == 0 else []
            )
