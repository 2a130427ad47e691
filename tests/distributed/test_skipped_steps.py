"""A step that is left out leaves no trace: weights, optimizer and running statistics have the bits of
before it, on every rank."""

from __future__ import annotations

import torch

from phalanx.mesh.mesh import open_mesh
from phalanx.nn.objective import causal_cross_entropy
from phalanx.observe.bus import Bus
from phalanx.parallel.step_stats import StepStats
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

LEFT_OUT = (1, 3, 4)
STEPS = 5


class LeavesOut:
    def reason_to_skip(self, step: int, facts: StepStats) -> str | None:
        return "loss_spike" if step in LEFT_OUT else None


def find_changes_of_steps(rank: int) -> dict[int, list[str]]:
    """The tensors of the state that each step changed."""
    job = job_for(2, dp_replicate=2)
    plan = make_plan(job, cluster=CPU, vocab_size=VOCAB)
    changes = {}
    with open_mesh(plan.layout, device="cpu") as mesh:
        state = new_state(mesh, job, plan, new_module(torch.float32))
        data = TrainingData(RandomSteps(rank, 2, 2), causal_cross_entropy(64))
        trainer = Trainer(job, plan, state, Bus(rank=rank), data, guards=[LeavesOut()])
        for step in range(1, STEPS + 1):
            before = whole_tensors(state)
            _, skipped = trainer.step()
            assert (skipped is None) == (step not in LEFT_OUT)
            changes[step] = differing(before, whole_tensors(state))
    return changes


def test_a_step_that_is_left_out_leaves_no_trace() -> None:
    for changes in run_ranks(2, find_changes_of_steps):
        for step in range(1, STEPS + 1):
            if step in LEFT_OUT:
                assert changes[step] == []
            else:
                moved = {"statistics.running_mean", "statistics.running_var", "lookup.weight"}
                assert moved <= set(changes[step])
