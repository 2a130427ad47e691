"""The trainer of a run, as every rank composes it of the run's state, data and storage."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.checkpoint.run_storage import RunStorage
from phalanx.core.roll_back import UnequalSteps
from phalanx.job.schema import Job
from phalanx.observe.bus import Bus
from phalanx.plan.plan import Plan
from phalanx.resilience.guards import LossSpikeGuard, NonFiniteWeightsGuard, SkippedStepsGuard
from phalanx.train.corruption import OnCorruption
from phalanx.train.memory import MemoryMeter
from phalanx.train.state import TrainState
from phalanx.train.stop import StopSignalFlags
from phalanx.train.trainer import Guard, Trainer
from phalanx.train.training_data import TrainingData


def build_trainer(
    job: Job,
    plan: Plan,
    state: TrainState,
    bus: Bus,
    data: TrainingData,
    *,
    storage: RunStorage,
    stop: StopSignalFlags | None = None,
    memory: MemoryMeter | None = None,
    guards: Sequence[Guard] = (),
    may_roll_back: bool = False,
    reads_on: bool = False,
    unequal: UnequalSteps | None = None,
) -> Trainer:
    """The trainer that `phalanx train` runs; `guards` come on top of the run's own.

    `may_roll_back`: whoever started the ranks goes back to a checkpoint when they ask for it.
    `reads_on`: it has done so for weights that were not finite, and is about to do the same steps.
    `unequal`: the steps that it went back from, to be compared when they are done again.
    """

    def find_next_sample() -> int:
        return state.samples_seen + job.train.global_batch_size

    on_corruption = _choose_what_corruption_does(job, may_roll_back=may_roll_back)
    own_guards: list[Guard] = [
        NonFiniteWeightsGuard(
            state.finite_weights.gather_broken,
            find_next_sample,
            may_roll_back=on_corruption == "rollback",
            # What comes back when the same steps are done again may be of their samples.
            reads_on=reads_on,
        ),
        SkippedStepsGuard(job.resilience.max_skipped_steps),
    ]
    if job.resilience.on_loss_spike != "warn":
        own_guards.append(
            LossSpikeGuard(
                find_next_sample,
                may_roll_back=may_roll_back and job.resilience.on_loss_spike == "rollback",
            )
        )
    return Trainer(
        job,
        plan,
        state,
        bus,
        data,
        storage=storage,
        guards=(*own_guards, *guards),
        stop=stop,
        memory=memory,
        on_corruption=on_corruption,
        unequal=unequal,
    )


def _choose_what_corruption_does(job: Job, *, may_roll_back: bool) -> OnCorruption:
    on_corruption = job.resilience.on_corruption
    if on_corruption == "rollback" and not may_roll_back:
        return "warn"
    return on_corruption
