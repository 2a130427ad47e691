"""The trainer of a run, as every rank composes it of the run's state, data and storage."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.checkpoint.run_storage import RunStorage
from phalanx.job.schema import Job
from phalanx.observe.bus import Bus
from phalanx.plan.plan import Plan
from phalanx.resilience.guards import LossSpikeGuard, NonFiniteWeightsGuard, SkippedStepsGuard
from phalanx.run.rank_run import RollBacks
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
    roll_backs: RollBacks | None = None,
) -> Trainer:
    """The trainer that `phalanx train` runs; `guards` come on top of the run's own.

    `roll_backs`: those of the run so far; None: nobody would go back at the ranks' wish.
    """
    may_roll_back = roll_backs is not None and (len(roll_backs.done) < job.resilience.max_rollbacks)
    roll_backs = roll_backs or RollBacks()

    def find_next_sample() -> int:
        return state.samples_seen + job.train.global_batch_size

    on_corruption = _choose_what_corruption_does(job, may_roll_back=may_roll_back)
    own_guards: list[Guard] = [
        NonFiniteWeightsGuard(
            state.finite_weights.gather_broken,
            find_next_sample,
            may_roll_back=on_corruption == "rollback",
            # What comes back when the same steps are done again may be of their samples.
            reads_on=roll_backs.is_before_lost_weights,
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
        unequal=roll_backs.find_unequal_steps(plan.layout.world_size),
    )


def _choose_what_corruption_does(job: Job, *, may_roll_back: bool) -> OnCorruption:
    on_corruption = job.resilience.on_corruption
    if on_corruption == "rollback" and not may_roll_back:
        return "warn"
    return on_corruption
