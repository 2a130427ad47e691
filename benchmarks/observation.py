"""What a step pays for all that observes it by default: phases, black box, recorded collectives,
pulse, memory, invariants, norms by block, and the event of each step.

    python benchmarks/observation.py [--steps N] [--turn N] [--ranks N] [--batch N] [--tensorboard]
                                     [--out FILE.json] [job.key=value ...]

Ranks train the default job with the trainer of `phalanx train`, on random tokens. All of it is on
and off in turns of `--turn` steps in the same processes, so that other load falls on both alike; N
steps each way. Off, nothing is timed, counted, checked or written: not even the hooks by which the
last gradient of a backward is known are there. What stays is what training itself needs (the
reduction of a step, its flags for stops and saves).

Prints what "on" adds to a turn: the mean of the differences of neighbouring turns with its 95 %
interval by bootstrap, and their median with bounds that hold it with 95 % (order statistics), in
per cent of a turn without, by the wall and by processor time of rank 0. A turn is the sum of its
steps: what is done each hundredth step counts. The process that watches the ranks of a run is not
in it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import phalanx
from forked_ranks import measure_in_forked_ranks
from phalanx.core.black_box import BlackBox, RankIdentity
from phalanx.core.phases import PhaseTimer
from phalanx.core.pulse import writing_pulse
from phalanx.mesh.collective_recorder import record_collectives
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.build import build_model, build_objective
from phalanx.observe.bus import Bus, OpenSink
from phalanx.optim.build import build_optimizer
from phalanx.parallel.data_parallel.replicate import BackwardCommunicationTimer
from phalanx.parallel.parallelize import parallelize
from phalanx.train.block_norms import BlockNormRecorder
from phalanx.train.invariants import RunInvariants
from phalanx.train.memory import MemoryMeter
from phalanx.train.state import TrainState
from phalanx.train.trainer import Trainer
from phalanx.train.training_data import TrainingData
from random_batches import RandomBatches

NUM_WARM_UP = 20
NUM_RESAMPLES = 4000
PROGRESS_INTERVAL_S = 5.0
VOCAB = 256
CLOCKS = ("wall", "processor time")


class UnobservedPhases(PhaseTimer):
    """Phases that nobody times, and that are written nowhere."""

    _nothing = contextlib.nullcontext()

    def __call__(self, name: str, words: str = "", *, axis: str = "") -> Any:
        return self._nothing

    def collective(self, words: str, *, axis: str = "") -> Any:
        return self._nothing

    def enter(self, name: str, words: str = "", *, axis: str = "") -> None: ...

    def leave(self, name: str) -> None: ...

    def enter_collective(self, words: str, *, axis: str = "") -> None: ...

    def leave_collective(self) -> None: ...


class ObservedTrainer:
    """A trainer of which all that observes can be switched off and on between two steps."""

    def __init__(self, trainer: Trainer, box: BlackBox) -> None:
        self._trainer, self._box = trainer, box
        self._phases = trainer.phases
        job, state, bus = trainer.job, trainer.state, trainer.bus
        observe = job.observe.model_copy(update={"invariants_every": 0, "norms_every": 0})
        unchecked = job.model_copy(update={"observe": observe})
        self._checks = {
            True: (trainer._invariants, trainer._norms),
            False: (
                RunInvariants(unchecked, state, bus, trainer.data.objective),
                BlockNormRecorder(0, trainer.plan, state.model, bus),
            ),
        }
        self._watch = state.model._context.axes.find(BackwardCommunicationTimer)
        self._hooks = [
            (hooks, dict(hooks))
            for parameter in state.model.module.parameters()
            if (hooks := parameter._post_accumulate_grad_hooks)
        ]
        trainer._invariants.start()
        trainer._recorder.start()

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """All of it, as `phalanx train` has it."""
        with writing_pulse(self._box), record_collectives(self._box):
            yield

    @contextlib.contextmanager
    def observing_nothing(self) -> Iterator[None]:
        """None of it."""
        trainer, watch = self._trainer, self._watch
        self._phases.discard()
        self._phases.__class__ = UnobservedPhases
        trainer._invariants, trainer._norms = self._checks[False]
        for hooks, _ in self._hooks:
            hooks.clear()
        if watch is not None:
            # It would miss the gradients that nobody has told it of.
            watch.start_before_backward = lambda: None
        try:
            yield
        finally:
            self._phases.__class__ = PhaseTimer
            trainer._invariants, trainer._norms = self._checks[True]
            for hooks, entries in self._hooks:
                hooks.update(entries)
            if watch is not None:
                del watch.start_before_backward
            trainer._recorder.start()

    def take_observed_step(self) -> None:
        """A step, and its record, as `Trainer.run` takes them."""
        trainer = self._trainer
        trainer._tracer.begin_step(trainer.state.step + 1)
        facts, skipped = trainer.step()
        with self._phases("record"):
            trainer._recorder.hold_step_facts(facts, skipped)
            trainer._recorder.record_last_step()
        trainer._tracer.end_step(trainer.state.step)

    def take_step(self) -> None:
        """A step that nobody records."""
        self._trainer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="observed, and not")
    parser.add_argument("--turn", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, help="sequences of a step; those of the job")
    parser.add_argument("--tensorboard", action="store_true", help="with the default sink")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", help="keys of the job")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = measure_in_forked_ranks(args.ranks, lambda rank, folder: _measure(rank, args, folder))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    for name, value in results.items():
        if name != "turns":
            print(f"{name:<34}{value}")


def _measure(rank: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    overrides = [f"parallel.ranks={args.ranks}", "train.steps=1000000", *args.overrides]
    if args.batch:
        overrides.append(f"train.global_batch_size={args.batch}")
    job = phalanx.load_job(None, overrides)
    plan = phalanx.make_plan(job, num_ranks=args.ranks, vocab_size=VOCAB)
    box = BlackBox(folder / "blackbox" / f"{rank}", RankIdentity(rank, args.ranks, 0, "cpu"))
    meter = MemoryMeter()
    phases = PhaseTimer(box, of_training=(meter.begin_phase,))
    sinks: list[tuple[str, OpenSink]] = []
    if args.tensorboard and rank == 0:
        from phalanx.observe.sinks.tensorboard import open_sink

        sinks.append(("tensorboard", lambda: open_sink(folder)))
    bus = Bus(rank=rank, run_dir=folder, sinks=sinks)
    with open_mesh(plan.layout, device="cpu", collectives=plan.parallel.collectives) as mesh:
        meter.start(mesh.device)
        model = parallelize(build_model(job, plan.model_shape), plan, mesh, phases=phases, seed=1)
        state = TrainState(model, build_optimizer(model, job.optim), seed=1)
        num_own = job.train.global_batch_size // plan.layout.data_parallel_size
        batches = RandomBatches(VOCAB, num_own, num_own // plan.num_microbatches, job.data.seq_len)
        data = TrainingData(batches, build_objective(job))
        trainer = Trainer(job, plan, state, bus, data, memory=meter)
        turns = _alternate(
            rank,
            args,
            ObservedTrainer(trainer, box),
            lambda turns: _summarise(turns, args, job, plan),
        )
    bus.close()
    return _summarise(turns, args, job, plan)


def _alternate(
    rank: int,
    args: argparse.Namespace,
    trainer: ObservedTrainer,
    summarise: Callable[[dict[str, list[tuple[float, float]]]], dict[str, Any]],
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each turn, "on" and "off", by the wall and by processor time."""
    with trainer.observing():
        for _ in range(NUM_WARM_UP):
            trainer.take_observed_step()
    seconds: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    num_turns = 2 * math.ceil(args.steps / args.turn)
    began = said_s = time.monotonic()
    for turn in range(num_turns):
        # on, off, off, on: neither way always follows the other.
        way = "on" if turn % 4 in (0, 3) else "off"
        observing, take_step = trainer.observing, trainer.take_observed_step
        if way == "off":
            observing, take_step = trainer.observing_nothing, trainer.take_step
        with observing():
            # Not counted: kernels have just been registered.
            take_step()
            wall_began, cpu_began = time.perf_counter(), time.process_time()
            for _ in range(args.turn):
                take_step()
            spent = time.perf_counter() - wall_began, time.process_time() - cpu_began
        seconds[way].append(spent)
        if rank == 0 and time.monotonic() - said_s > PROGRESS_INTERVAL_S:
            said_s = time.monotonic()
            left_s = (time.monotonic() - began) / (turn + 1) * (num_turns - turn - 1)
            print(f"turn {turn + 1} of {num_turns}, {left_s:.0f} s left", flush=True)
            if args.out and turn % 4 == 3:
                # Whatever ends it, the turns so far are kept.
                args.out.write_text(json.dumps(summarise(seconds), indent=1) + "\n")
    return seconds


def _compare(on: Sequence[float], off: Sequence[float]) -> dict[str, float]:
    """Per cent of the median of `off` that `on` adds: mean and median of neighbours' differences,
    with their bounds."""
    differences = sorted(one - other for one, other in zip(on, off, strict=True))
    count, draw = len(differences), random.Random(0)
    means = sorted(
        statistics.mean(draw.choices(differences, k=count)) for _ in range(NUM_RESAMPLES)
    )
    margin = 0.98 * math.sqrt(count)
    values = {
        "mean": statistics.mean(differences),
        "mean_low": means[int(0.025 * NUM_RESAMPLES)],
        "mean_high": means[int(0.975 * NUM_RESAMPLES)],
        "median": statistics.median(differences),
        "median_low": differences[max(int(count / 2 - margin), 0)],
        "median_high": differences[min(math.ceil(count / 2 + margin), count - 1)],
    }
    scale = 100 / statistics.median(off)
    return {name: round(value * scale, 3) for name, value in values.items()}


def _summarise(
    turns: dict[str, list[tuple[float, float]]], args: argparse.Namespace, job: Any, plan: Any
) -> dict[str, Any]:
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "layout": str(plan.layout),
        "sequences": f"{job.train.global_batch_size} of {job.data.seq_len} tokens",
        "steps each way": len(turns["off"]) * args.turn,
    }
    for clock, name in enumerate(CLOCKS):
        on = [each[clock] for each in turns["on"]]
        off = [each[clock] for each in turns["off"]]
        results[f"step off, ms of {name}"] = round(1e3 * statistics.median(off) / args.turn, 3)
        results[f"{name} added, %"] = _compare(on, off)
    return results | {"turns": turns}


if __name__ == "__main__":
    main()
