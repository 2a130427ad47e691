"""phalanx's own Trainer in a layout, as a rank of `phalanx train` has it: with its black box, its
events and its checks; without sinks, evaluations and saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.bench.training.payload import RankSetting
from phalanx.bench.training.rank import TrainingTurns
from phalanx.checkpoint.run_storage import RunStorage
from phalanx.core.black_box import BlackBox, RankIdentity
from phalanx.core.phases import PhaseTimer
from phalanx.core.pulse import writing_pulse
from phalanx.launch.paths import black_box_path
from phalanx.mesh.collective_recorder import record_collectives
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.build import build_objective
from phalanx.observe.bus import Bus
from phalanx.parallel.executor import Batch
from phalanx.parallel.step_stats import StepStats
from phalanx.run.build_trainer import build_trainer
from phalanx.run.weights import build_training_state
from phalanx.train.memory import MemoryMeter
from phalanx.train.training_data import TrainingData


class _TurnsEnded(Exception):
    """There are no more steps: the trainer does not end by itself."""


@dataclass
class _TurnBatches:
    """Hands the trainer the microbatches of each step, when it is its turn."""

    steps: Iterator[Sequence[Batch]]

    def step_microbatches(self, step: int) -> Sequence[Batch]:
        for microbatches in self.steps:
            return microbatches
        raise _TurnsEnded


@dataclass
class _LossRecorder:
    """A guard that never objects, and notes the loss of all ranks."""

    turns: TrainingTurns

    def reason_to_skip(self, step: int, facts: StepStats) -> str | None:
        self.turns.record_loss(facts.loss)
        return None


def train_in_turns(setting: RankSetting, turns: TrainingTurns) -> None:
    """Train in the layout of the setting's plan, through the collectives that it names."""
    job, plan, run_dir = setting.job, setting.plan, setting.run_dir
    meter = MemoryMeter()
    identity = RankIdentity(setting.rank, setting.num_ranks, 0, "cpu")
    box = BlackBox(black_box_path(run_dir, setting.rank), identity)
    phases = PhaseTimer(box, (), of_training=(meter.begin_phase,))
    phases.enter("startup")
    bus = Bus(rank=setting.rank, attempt=0, run_dir=run_dir)
    with (
        writing_pulse(box),
        record_collectives(box, None),
        open_mesh(plan.layout, device="cpu", collectives=plan.parallel.collectives) as mesh,
    ):
        state = build_training_state(job, plan, mesh, phases)
        data = TrainingData(_TurnBatches(iter(turns)), build_objective(job))
        trainer = build_trainer(
            job,
            plan,
            state,
            bus,
            data,
            storage=RunStorage.open(run_dir),
            memory=meter,
            guards=(_LossRecorder(turns),),
        )
        phases.leave("startup")
        try:
            trainer.run()
        except _TurnsEnded:
            pass
